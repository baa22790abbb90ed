"""ScienceWorld's simulator: one Java process for all episodes of a process, each with a world of its own.

The simulator keeps things in sets that are ordered by Java's identity hash codes, which differ from load to
load. The process is started with constant ones, so that an episode can be played again.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache

from agentenv.core import DependencyMissing, UsageError, install_line
from agentenv_worlds.java import Simulator, check_java, package_folder
from agentenv_worlds.names import check_known

__all__ = ["INSTALL", "World", "close_simulator", "gold_of", "read_name", "tasks", "variations"]

INSTALL = install_line("scienceworld")

JAVA_OPTIONS = ("-Xmx2g", "-XX:+UseSerialGC", "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")
"""A limit of the heap, which would be a quarter of the machine's memory, and constant hash codes."""
SIMPLIFICATIONS = (
    "easy",
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
)
"""ScienceWorld's ways to make a task easier; `easy` stands for those that fit the task."""

_SIMULATOR = Simulator("scienceworld", "scienceworld.jar", JAVA_OPTIONS)


def close_simulator() -> None:
    """End this process's simulator; the next episode starts a new one."""
    _SIMULATOR.close()


class World:
    """One task in the simulator."""

    def __init__(self) -> None:
        with _SIMULATOR.lock:
            self._server = _SIMULATOR.jvm.scienceworld.runtime.pythonapi.PythonInterface()

    def load(self, name: str, variation: int, *, gold: bool = False) -> None:
        """Load a variation of a task from its beginning; with `gold`, work out how it is solved."""
        task, *simplifications = name.split("+")
        with _SIMULATOR.lock:
            self._server.load(task, variation, ",".join(simplifications), gold)
            self._server.reset()

    def gold(self) -> tuple[str, ...]:
        """Return the commands that solve the task, after loading it with `gold`."""
        with _SIMULATOR.lock:
            return tuple(self._server.getGoldActionSequence())

    def variations(self, split: str) -> tuple[int, ...]:
        """Return the variations of the loaded task in ScienceWorld's split."""
        with _SIMULATOR.lock:
            return tuple(getattr(self._server, f"getVariations{split.title()}")())

    def introduction(self) -> tuple[str, str]:
        """Return what is to be done and what can be seen; to look is a move, as when ScienceWorld resets."""
        with _SIMULATOR.lock:
            return str(self._server.getTaskDescription()), str(self._server.step("look around"))

    def step(self, command: str) -> tuple[str, float, bool]:
        """Return what happens, the score up to 1 in hundredths, and whether the task is done or failed."""
        with _SIMULATOR.lock:
            said = str(self._server.step(command))
            score = round(100 * self._server.getScore()) / 100  # as ScienceWorld's own environment gives it
            return said, score, bool(self._server.getCompleted()) or score < 0


@lru_cache(maxsize=1024)
def gold_of(name: str, variation: int) -> tuple[str, ...]:
    """Return the simulator's own solution of a variation."""
    world = World()
    world.load(name, variation, gold=True)
    return world.gold()


@lru_cache(maxsize=128)
def variations(name: str, split: str) -> tuple[int, ...]:
    """Return the variations of a task in a split: `train`, `dev` or `test`."""
    world = World()
    world.load(name, 0)
    return world.variations(split)


def read_name(name: str) -> None:
    """Check a name such as `boil` or `boil+easy`, the packages and Java; nothing is started.

    Raises:
        DependencyMissing: A package or Java is not installed.
        UnknownEnvironment: ScienceWorld has no such task.
        UsageError: ScienceWorld has no such simplification.
    """
    missing = [package for package in ("scienceworld", "py4j") if importlib.util.find_spec(package) is None]
    if missing:
        raise DependencyMissing(f"scienceworld:{name} needs {' and '.join(missing)}", remedy=INSTALL)
    check_java(f"scienceworld:{name}")
    task, *simplifications = name.split("+")
    check_known("ScienceWorld has no task", task, tasks())
    for word in simplifications:
        check_known("ScienceWorld has no simplification", word, SIMPLIFICATIONS, UsageError)


def tasks() -> Sequence[str]:
    """Return the names of ScienceWorld's tasks."""
    listed: list[Mapping[str, str]] = json.loads(
        (package_folder("scienceworld") / "tasks.json").read_text(encoding="utf-8")
    )
    return [task["task_name"] for task in listed]
