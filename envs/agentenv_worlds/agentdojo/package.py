"""The suites of AgentDojo, loaded without the clients of model providers.

The package's folder `agent_pipeline` imports the clients of four providers in its `__init__`, of which the
suites, the attacks and the scorers need nothing. While these are imported, an empty module stands in for that
folder. Afterwards it is taken away, so that a program that has the clients can import the folder as it is.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from agentenv.core import DependencyMissing, UsageError, install_line
from agentenv_worlds.names import check_known

__all__ = [
    "INSTALL",
    "MODULES",
    "SUITES",
    "VERSION",
    "attack_of",
    "check_suite",
    "fresh",
    "module",
    "suite_of",
]

VERSION = "v1.2.2"
"""Version of the benchmark's tasks; AgentDojo keeps older ones under their own names."""

SUITES = ("workspace", "travel", "banking", "slack")
MODULES = ("agentdojo", "deepdiff", "email_validator", "yaml")
INSTALL = install_line("agentdojo", more="agentdojo")

_FOLDER = "agentdojo.agent_pipeline"
_STAND_INS = (_FOLDER, f"{_FOLDER}.llms", f"{_FOLDER}.llms.google_llm")
_ATTACKS = ("baseline_attacks", "dos_attacks", "important_instructions_attacks")

_READ_THE_CLOCK = ("cloud_drive_client", "email_client")
NOW = datetime.datetime(2024, 5, 15, 12)  # noqa: DTZ001 - the data have no time zones
"""Time at which a tool sends a mail or writes a file: noon of the day that the data call today. AgentDojo
takes the machine's time, so an episode would differ when it is played again."""

_lock = threading.Lock()


def check_suite(name: str) -> None:
    """Check that a suite exists and that its packages are installed; nothing is imported.

    Raises:
        UnknownEnvironment: There is no such suite.
        DependencyMissing: A package is not installed.
    """
    check_known("AgentDojo has no suite", name, SUITES)
    missing = [package for package in MODULES if importlib.util.find_spec(package) is None]
    if missing:
        raise DependencyMissing(f"agentdojo:{name} needs {' and '.join(missing)}", remedy=INSTALL)


@lru_cache(maxsize=len(SUITES))
def suite_of(name: str) -> Any:
    """Return a suite of AgentDojo."""
    return module("task_suite.load_suites").get_suite(VERSION, name)


@lru_cache(maxsize=64)
def attack_of(suite: str, attack: str, model: str) -> Any:
    """Return an attack on a suite, which addresses the model by the name that AgentDojo has for it.

    Raises:
        UsageError: AgentDojo has no such attack, or no name for the model.
    """
    attacks: Mapping[str, Any] = module("attacks.attack_registry").ATTACKS
    check_known("AgentDojo has no attack", attack, sorted(attacks), UsageError)
    names: Mapping[str, str] = module("models").MODEL_NAMES
    if model not in names:
        raise UsageError(
            f"AgentDojo's attacks have no name for the model {model!r}",
            remedy=f"choose the one that fits best: {', '.join(names)}",
        )
    return attacks[attack](suite_of(suite), SimpleNamespace(name=model))


def fresh(suite: str, user_task: str, injection_task: str, attack: str, model: str) -> Any:
    """Return the first state of a task's data, which belongs to the caller.

    Args:
        suite: name of the suite.
        user_task: id of the user's task.
        injection_task: id of the attacker's task; empty if nobody attacks.
        attack: name of the attack.
        model: AgentDojo's name of the model that is addressed.
    """
    if not injection_task:
        attack = model = user_task = ""
    return _injected(suite, user_task, injection_task, attack, model).model_copy(deep=True)


@lru_cache(maxsize=256)
def _injected(suite: str, user_task: str, injection_task: str, attack: str, model: str) -> Any:
    suite_object = suite_of(suite)
    injections: Mapping[str, str] = {}
    if injection_task:
        user, goal = suite_object.user_tasks[user_task], suite_object.injection_tasks[injection_task]
        injections = attack_of(suite, attack, model).attack(user, goal)
    return suite_object.load_and_inject_default_environment(injections)


def module(name: str) -> Any:
    """Return a module of AgentDojo, such as `functions_runtime`."""
    with _lock:
        _load()
    return importlib.import_module(f"agentdojo.{name}")


@lru_cache(maxsize=1)
def _load() -> None:
    with _without_clients():
        for name in ("task_suite.load_suites", "attacks.attack_registry", "agent_pipeline.tool_execution"):
            importlib.import_module(f"agentdojo.{name}")
        for name in _ATTACKS:
            importlib.import_module(f"agentdojo.attacks.{name}")
    for name in _READ_THE_CLOCK:
        tools: Any = importlib.import_module(f"agentdojo.default_suites.v1.tools.{name}")
        tools.datetime = SimpleNamespace(**{**vars(datetime), "datetime": SimpleNamespace(now=lambda: NOW)})


@contextmanager
def _without_clients() -> Generator[None]:
    """Let empty modules stand in for the folder of pipelines, unless a program has imported it already."""
    if _FOLDER in sys.modules:
        yield
        return
    root = importlib.import_module("agentdojo")
    for name in _STAND_INS:
        stand_in = ModuleType(name)
        stand_in.__path__ = []
        sys.modules[name] = stand_in
    sys.modules[_FOLDER].__path__ = [str(Path(str(root.__file__)).parent / "agent_pipeline")]
    # Some providers make a call without a name; this is the name that AgentDojo gives it.
    sys.modules[_STAND_INS[-1]].__dict__["EMPTY_FUNCTION_NAME"] = "<empty-function-name>"
    try:
        yield
    finally:
        for name in _STAND_INS:
            del sys.modules[name]
