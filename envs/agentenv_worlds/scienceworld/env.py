"""Experiments of ScienceWorld: `scienceworld:boil`, `scienceworld:find-animal+easy`.

1. A task is a variation of an experiment; the splits `train`, `dev` and `test` are ScienceWorld's own.
2. The last line of the model's text is its command, and what happens is the observation.
3. The reward is ScienceWorld's score from 0 to 1, however the episode ends. Its part `solved` is 1 for the
   full score. Where the score is negative, because the model focused on the wrong thing, the episode ends and
   the reward is 0.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.core import Message, Outcome
from agentenv_worlds.commands import Adventure
from agentenv_worlds.scienceworld.simulator import World, gold_of, variations
from agentenv_worlds.turns import turn_of

__all__ = ["MAX_TURNS", "SPLITS", "ScienceWorld", "rows"]

MAX_TURNS = 200
"""Turns of one episode; the longest of ScienceWorld's own solutions that was seen has 178 commands."""

SPLITS = ("train", "dev", "test")

_HELP = """Commands, where A and B stand for things that you see:
open A, close A, activate A, deactivate A, connect A to B, disconnect A, use A on B, look around, look at A,
look in A, read A, move A to B, pick up A, put down A, pour A in B, dunk A in B, mix A, go A, eat A, flush A,
focus on A, wait, wait1, inventory, task.
"focus on A" says that A is what the task asks about. Focusing on the wrong thing ends the task."""


class ScienceWorld(Adventure):
    """One experiment.

    Args:
        task: name of the experiment, with its simplifications if there are any.
    """

    system_prompt = (
        "You do experiments in a world of text. Answer with one command. "
        f"If you write more, the last line is your command.\n\n{_HELP}"
    )

    def __init__(self, task: str) -> None:
        self._name = task
        self._world: World | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Load the task's variation, and return what is to be done and what can be seen."""
        self._world = self._world or World()
        self._world.load(self._name, int(str(self.task["variation"])))
        self._reached = 0.0
        asked, seen = self._world.introduction()
        return f"{asked}\n\n{seen}", {}

    def obey(self, command: str) -> tuple[str, bool]:
        """Do what the command says."""
        assert self._world is not None
        said, self._reached, done = self._world.step(command)
        return said, done

    def finish(self, stop_reason: str) -> Outcome:
        """Return the score, which is never below 0, and whether it is the full one."""
        score = max(self._reached, 0.0)
        return Outcome(score, {"score": score, "solved": float(score >= 1.0)})

    def close(self) -> None:
        """Forget the world."""
        self._world = None

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
        """Give the next command of ScienceWorld's own solution."""
        gold = gold_of(str(task["task"]), int(str(task["variation"])))
        return {"role": "assistant", "content": gold[turn_of(messages)]}


def rows(task: str, split: str) -> list[dict[str, object]]:
    """Return the variations of an experiment in a split."""
    return [
        {"id": f"{task}-{variation}", "task": task, "variation": variation}
        for variation in variations(task, split)
    ]
