"""Text adventures of TextWorld: `textworld:simple`, `textworld:cooking-recipe2+take2+cook+go6`.

1. A task is a game, made from its seed by TextWorld's own generator. Games of the split `test` have odd
   seeds and, where TextWorld has them, foods that no game of the split `train` has.
2. The last line of the model's text is its command, and the game's answer is the observation. With
   `env.commands=false` the observation does not list the commands that the game would take.
3. The reward is the game's score, as a share of the highest one, however the episode ends. Its part `won` is
   1 if the game was won.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.core import Message, Outcome, ToolError
from agentenv_worlds.commands import Adventure
from agentenv_worlds.textworld.games import game_of, started
from agentenv_worlds.turns import turn_of

__all__ = ["MAX_TURNS", "TextWorld", "held_out_tasks", "train_tasks"]

MAX_TURNS = 50
"""Turns of one episode; the longest walkthrough that was seen with the default settings has 14 commands."""

_META = re.compile(
    r"\b(?:save|restore|restart|quit|q|undo|script|transcrip\w*|unscript|noscript|verify|recording|replay)\b"
)
"""Words that talk to the interpreter. `save` and `script` would write files, and the others would end the
game or begin it again. The interpreter reads the first nine letters of a word."""

_STATUS = re.compile(r"\n>\s*(?:-=[^\n]*)?\Z")
"""The interpreter's prompt, and its status line with the room and the score."""
_BLANK_LINES = re.compile(r"\n\s*\n\s*")


class TextWorld(Adventure):
    """One game.

    Args:
        game: name of the game, with or without settings.
        commands: list the commands that the game would take in each observation.
    """

    system_prompt = (
        "You play a text adventure. Answer with one command, such as: open wooden door. "
        "If you write more, the last line is your command."
    )

    def __init__(self, game: str, commands: bool = True) -> None:
        self._name = game
        self._commands = commands
        self._play: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Make the task's game, start it, and return its introduction."""
        self.close()
        seed = int(str(self.task.get("seed", seed)))
        self._game = game_of(self._name, str(self.task.get("split", "train")), seed)
        self._play = started(self._game)
        self._state = self._play.reset()
        return self._shown(), {}

    def obey(self, command: str) -> tuple[str, bool]:
        """Give the game the command, unless it is meant for the interpreter."""
        if _META.search(command.lower()):
            raise ToolError("That is no command of the game. Answer with what you do next.")
        self._state, _, done = self._play.step(command)
        return self._shown(), bool(done)

    def finish(self, stop_reason: str) -> Outcome:
        """Return the score as a share of the highest one, and whether the game was won."""
        share = int(self._state["score"]) / int(self._state["max_score"])
        return Outcome(share, {"score": share, "won": float(bool(self._state["won"]))})

    def close(self) -> None:
        """End the interpreter."""
        if self._play is not None:
            self._play.close()
            self._play = None

    def _shown(self) -> str:
        """Return the game's answer without its banner and long gaps, and the commands it would take."""
        paragraphs = _BLANK_LINES.split(_STATUS.sub("", str(self._state["feedback"]).strip()))
        text = "\n\n".join(paragraph for paragraph in paragraphs if "$$" not in paragraph)
        if not self._commands or self._state["won"] or self._state["lost"]:
            return text
        return f"{text}\n\nCommands: {', '.join(self._state['admissible_commands'])}."

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
        """Give the next command of TextWorld's own walkthrough."""
        game = game_of(str(task["game"]), str(task["split"]), int(str(task["seed"])))
        return {"role": "assistant", "content": game.walkthrough[turn_of(messages)]}


def train_tasks(game: str, seed: int) -> dict[str, object]:
    """Return the training task of a seed; training tasks use even seeds."""
    return {"game": game, "split": "train", "seed": 2 * seed}


def held_out_tasks(game: str, seed: int) -> dict[str, object]:
    """Return the held-out task of a seed; held-out tasks use odd seeds."""
    return {"game": game, "split": "test", "seed": 2 * seed + 1}
