"""Short text games of TextWorldExpress: `textworld_express:coin`, `textworld_express:coin+numLocations=4`.

1. A task is a game, made from its seed by TextWorldExpress's simulator; the splits `train`, `dev` and `test`
   are its own, with 1,000 seeds each.
2. The last line of the model's text is its command. With `env.commands=false` the observation does not list
   the commands that the game would take.
3. The reward is the game's score from 0 to 1, however the episode ends. Its part `solved` is 1 for a game
   that succeeded. A game that failed ends, and keeps its score, but never one below 0.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentenv.core import Message, Outcome, UnknownEnvironment
from agentenv_worlds.commands import Adventure
from agentenv_worlds.java import Simulator, check_java
from agentenv_worlds.names import check_known
from agentenv_worlds.turns import turn_of

__all__ = ["FOLDS", "GAMES", "MAX_TURNS", "TextWorldExpress", "check_name", "rows"]

GAMES = ("cookingworld", "twc", "coin", "mapreader", "arithmetic", "sorting", "simonsays", "peckingorder")

FOLDS: Mapping[str, int] = {"train": 0, "dev": 10_000, "test": 20_000}
"""First seed of each split."""
SEEDS = 1_000
"""Seeds of a split."""

MAX_TURNS = 100
"""Turns of an episode; TextWorldExpress's own limit is 100 commands by default."""

SIMULATOR = Simulator(
    "textworld_express",
    "textworld-express.jar",
    ("-Xmx2g", "-XX:+UseSerialGC"),
    ("cooking_world.json", "twc_objects.folds.json"),
)


class TextWorldExpress(Adventure):
    """One game.

    Args:
        game: name of the game, with settings of TextWorldExpress if there are any.
        commands: list the commands that the game would take in each observation.
    """

    system_prompt = "You play a text game. Answer with one command. If you write more, the last line is it."

    def __init__(self, game: str, commands: bool = True) -> None:
        self._name, self._commands = game, commands
        self._server: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Make the task's game, and return what is to be done and what can be seen."""
        fold, number = str(self.task["fold"]), int(str(self.task["seed"]))
        with SIMULATOR.lock:
            self._server, self._state = _started(self._name, fold, number, gold=False)
            asked = str(self._server.getTaskDescription())
        return f"{asked}\n\n{self._shown()}", {}

    def obey(self, command: str) -> tuple[str, bool]:
        """Give the game the command."""
        with SIMULATOR.lock:
            if command == "help":  # as TextWorldExpress does; it is no move
                return str(self._server.getTaskDescription()), False
            self._state = json.loads(self._server.stepJSON(command))
        over = self._state["tasksuccess"] or self._state["taskfailure"] or self._state["score"] >= 1.0
        return self._shown(), bool(over)

    def finish(self, stop_reason: str) -> Outcome:
        """Return the game's score, which is never below 0, and whether it succeeded."""
        score = max(float(self._state["score"]), 0.0)
        return Outcome(score, {"score": score, "solved": float(bool(self._state["tasksuccess"]))})

    def close(self) -> None:
        """Forget the game."""
        self._server = None

    def _shown(self) -> str:
        text = str(self._state["observation"]).strip()
        commands = sorted(set(self._state["validActions"]))
        return f"{text}\n\nCommands: {', '.join(commands)}." if self._commands and commands else text

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
        """Give the next command of TextWorldExpress's own solution."""
        gold = _gold(str(task["game"]), str(task["fold"]), int(str(task["seed"])))
        return {"role": "assistant", "content": gold[min(turn_of(messages), len(gold) - 1)]}


def _started(name: str, fold: str, seed: int, *, gold: bool) -> tuple[Any, dict[str, Any]]:
    """Return a new game and its first state; the simulator's lock is held.

    Raises:
        UnknownEnvironment: The simulator does not know a setting.
    """
    game, *settings = name.split("+")
    server = SIMULATOR.jvm.textworldexpress.runtime.PythonInterface()
    problem = str(server.load(game, ",".join(settings)) or "")
    if problem:
        raise UnknownEnvironment(f"textworld_express:{name} cannot be made: {problem}")
    return server, json.loads(server.generateNewGameJSON(seed, fold, gold))


@lru_cache(maxsize=1024)
def _gold(name: str, fold: str, seed: int) -> tuple[str, ...]:
    with SIMULATOR.lock:
        server, _ = _started(name, fold, seed, gold=True)
        return tuple(server.getGoldActionSequence())


def check_name(name: str) -> None:
    """Check a name such as `coin` or `coin+numLocations=4`, and that there is Java; nothing is started.

    Raises:
        DependencyMissing: There is no Java.
        UnknownEnvironment: TextWorldExpress has no such game, or a setting has no value.
    """
    game, *settings = name.split("+")
    check_known("TextWorldExpress has no game", game, GAMES)
    if any(not setting.partition("=")[2].isdigit() for setting in settings):
        raise UnknownEnvironment(
            f"textworld_express:{name} has a setting without a number", remedy="write coin+numLocations=4"
        )
    check_java(f"textworld_express:{name}")


def rows(game: str, fold: str) -> list[dict[str, object]]:
    """Return the tasks of a split."""
    first = FOLDS[fold]
    return [
        {"id": f"{game}-{seed}", "game": game, "fold": fold, "seed": seed}
        for seed in range(first, first + SEEDS)
    ]
