"""An environment some of whose tasks kill the process that plays them, for tests of workers.

It stands in a file of its own, which each worker loads by its path.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

from agentenv.envs import ToolEnv, register
from agentenv.tools import tool

WAITING = range(20, 32)
"""Tasks of the split "once" that wait for the file `until`."""


def tasks_with(kills: dict[int, int], number: int) -> list[dict[str, int]]:
    """Return tasks, each with the number of processes that it kills."""
    return [{"x": x, "kills": kills.get(x, 0)} for x in range(number)]


def mark(directory: str, name: str) -> None:
    """Make an empty file."""
    Path(directory, name).touch()


class Deadly(ToolEnv):
    """Name a number.

    Args:
        directory: where a file is made before each kill; nothing is killed if it is empty.
        until: file for which some episodes wait, after a mark in the directory; nothing is killed with it.
    """

    def __init__(self, directory: str = "", until: str = "") -> None:
        super().__init__()
        self.directory = directory
        self.until = until

    async def start(self, x: int, kills: int = 0) -> str:
        self.x = x
        if self.directory and kills < 0:
            mark(self.directory, f"waits-{x}-{os.getpid()}")
            await asyncio.Event().wait()
        if self.until and x in WAITING:
            mark(self.directory, f"waits-{x}-{os.getpid()}-{id(self)}")
            while not await asyncio.to_thread(Path(self.until).exists):  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.05)
        elif self.directory and not self.until:
            self._kill(kills)
        return f"Name {x}, or something near it."

    def _kill(self, kills: int) -> None:
        before = len(list(Path(self.directory).glob(f"killed-{self.x}-*")))
        if before < kills:
            mark(self.directory, f"killed-{self.x}-{before}")
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()  # the signal may arrive a moment later

    @tool
    def near(self, number: int) -> int:
        """Return how far a number is away."""
        return abs(number - self.x)

    def reward(self, answer: str) -> float:
        return float(str(self.x) in answer)

    def close(self) -> None:
        if self.directory and self.x < 0:
            mark(self.directory, f"closed-{os.getpid()}")


register(
    "helpers/Deadly-v0",
    Deadly,
    tasks={
        "train": tasks_with({}, 500),
        "once": tasks_with({5: 1, 11: 1}, 500),
        "poison": tasks_with({3: 99}, 40),
    },
    override=True,  # one test imports this module by its name, and another loads its file
)
