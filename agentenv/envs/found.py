"""What a file holds that can be played, or why nothing in it can be.

Classes of ours come first. If there are none, these are environments of Gymnasium, classes in the shape of
those, with `reset` and `step`, or of TRL's, with `reset` and methods that are tools, or tasks of Inspect.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["OURS", "SEEDED", "inspect_tasks", "kind_of", "others_in", "playable_in"]

OURS = "an environment of agentenv"
SEEDED = ("a gymnasium.Env", "a class with reset() and step()")
"""Kinds of environments whose tasks are seeds, unless they are registered with others."""
_TOOL_MAKERS = ("agentenv", "agents", "langchain", "langchain_core", "pydantic_ai", "smolagents")


def playable_in(module: str) -> list[type]:
    """Return the classes of a loaded module that can be played."""
    own = [
        value
        for value in vars(sys.modules[module]).values()
        if isinstance(value, type) and value.__module__ == module and kind_of(value)
    ]
    ours = [cls for cls in own if kind_of(cls) == OURS]
    return list(dict.fromkeys(ours or own))


def kind_of(cls: type) -> str:
    """Return in words what a class is to be played as; empty if it is no environment."""
    gymnasium, env = sys.modules.get("gymnasium"), sys.modules.get("agentenv.envs.env")
    if env is not None and issubclass(cls, env.Env):
        return OURS
    if gymnasium is not None and issubclass(cls, gymnasium.Env):
        return SEEDED[0]
    if not inspect.isfunction(getattr(cls, "reset", None)):
        return ""
    if not hasattr(cls, "get_reward") and inspect.isfunction(getattr(cls, "step", None)):
        return SEEDED[1]
    public = [name for name, _ in inspect.getmembers(cls, inspect.isfunction) if name[0] != "_"]
    tools = [name for name in public if name not in {"reset", "close", "get_reward"}]
    return f"a class with reset() and the tools {', '.join(tools)}" if tools else ""


def inspect_tasks(module: str) -> list[str]:
    """Return the names of a loaded module's tasks of Inspect, which the world `inspect:` plays."""
    registered = ((name, getattr(value, "__registry_info__", None)) for name, value in _values(module))
    return [name for name, info in registered if getattr(info, "type", "") == "task"]


def others_in(module: str, file: str) -> Iterator[str]:
    """Yield what a module holds that is no environment by itself, with what would make it one.

    Args:
        module: name of the loaded module.
        file: its name on the command line.
    """
    loaded = sys.modules[module]
    if hasattr(loaded, "load_environment"):
        yield "load_environment() of verifiers: install it as a package, and name it verifiers:PACKAGE"
    for name in inspect_tasks(module):
        yield f"the task {name} of Inspect, which is named inspect:{file}@{name}"
    tools = [name for name, value in _values(module) if _is_tool(value)]
    if tools:
        yield f"the tools {', '.join(tools)}: give them to an environment, tools = ({tools[0]},)"
    source = getattr(loaded, "__file__", None)
    if source is not None:
        yield from _inner_classes(Path(source), file)


def _values(module: str) -> Iterable[tuple[str, object]]:
    return vars(sys.modules[module]).items()


def _is_tool(value: object) -> bool:
    kind = type(value)
    return kind.__module__.partition(".")[0] in _TOOL_MAKERS and "Tool" in kind.__name__


def _inner_classes(source: Path, file: str) -> Iterator[str]:
    """Yield the classes inside functions that look like environments."""
    tree = ast.Module([], [])
    with suppress(OSError, SyntaxError, ValueError):
        tree = ast.parse(source.read_text(encoding="utf-8"))
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for inner in ast.walk(function):
            if isinstance(inner, ast.ClassDef) and any(
                isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name in {"reset", "start"}
                for part in inner.body
            ):
                yield (
                    f"the class {inner.name} inside {function.name}(): move it to the top level, or let a "
                    f"function return an object of it, and name {file}:FUNCTION"
                )
