"""Names in an environment's class: which ones the core calls, and how a tool may have any of them.

1. A tool may have any name. If the core uses the name itself (`end`, `step`, `context`, ...), the tool is
   moved to another attribute: the model calls it by its name, and the attribute stays the environment's own.
2. What the core calls as a method must be one. A property or a value is refused when the class is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from agentenv.core.errors import UsageError
from agentenv.tools.tool import Tool

__all__ = ["check_methods", "move_tools"]

_CORE = ("begin", "advance", "is_finished", "end", "shutdown")
"""Asynchronous methods that the runner calls; see `agentenv.core.episode_env.EpisodeEnv`."""


def check_methods(cls: type, hooks: Iterable[str]) -> None:
    """Check that a class defines the methods that authors write as methods.

    Raises:
        UsageError: The class hides such a method, or one that the runner calls, behind something else.
    """
    for name in hooks:
        value = _inner(cls.__dict__.get(name))
        if name in cls.__dict__ and not callable(value):
            raise UsageError(
                f"{cls.__name__}.{name} is a {type(value).__name__}, but the environment calls it",
                remedy=f"write it as a method: def {name}(self)",
            )
    for name in _CORE:
        if name in cls.__dict__ and not inspect.iscoroutinefunction(_inner(cls.__dict__[name])):
            raise UsageError(
                f"{cls.__name__}.{name} hides the method {name}() that the runner calls",
                remedy="give it another name",
            )


def move_tools(cls: type, base: type) -> None:
    """Move the tools whose names are attributes of the base class out of the way of these attributes."""
    taken = set(dir(base))
    if any(isinstance(_inner(vars(cls).get(name)), Tool) for name in taken):
        # All tools are set again, so that their order stays that of their definition.
        for name, value in list(vars(cls).items()):
            if isinstance(_inner(value), Tool):
                delattr(cls, name)
                setattr(cls, f"_tool_{name}" if name in taken else name, value)
    for name in taken:
        # A class beside the environments in the bases may define such a tool, too, and is left as it is.
        value = inspect.getattr_static(cls, name, None)
        if isinstance(_inner(value), Tool):
            setattr(cls, f"_tool_{name}", value)
            setattr(cls, name, _next_of(cls, name))


def _next_of(cls: type, name: str) -> object:
    """Return the first attribute of this name in the order of the bases that is no tool."""
    values = (vars(owner)[name] for owner in cls.__mro__ if name in vars(owner))
    return next(value for value in values if not isinstance(_inner(value), Tool))


def _inner(value: object) -> object:
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value
