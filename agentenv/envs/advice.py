"""What the author of an environment most likely forgot: told once for a class, wherever it is played."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import islice
from weakref import WeakKeyDictionary

from agentenv.core.episode_env import Task
from agentenv.core.visible import logger

__all__ = ["tell_if_alike", "tell_once", "unmarked_methods"]

_log = logger(__name__)
LOOKED_AT = 32
"""Tasks of which at least two differ, unless the author forgot something."""
_told: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()


def tell_once(owner: type, advice: str, *values: object) -> None:
    """Log an advice, unless this class was given it before.

    Args:
        owner: the class.
        advice: the text, with a `%s` for each value.
        values: what to put into it.
    """
    told = _told.setdefault(owner, set())
    if advice not in told:
        told.add(advice)
        _log.warning(advice, *values)


def unmarked_methods(cls: type, base: type) -> list[str]:
    """Return the public methods that a class adds itself to a base class, which may be meant as tools."""
    return [
        name
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and not name.startswith("_") and not hasattr(base, name)
    ]


def tell_if_alike(env_id: str, tasks: Iterable[Task]) -> None:
    """Log that the tasks of a run have the same fields; those without fields differ by their seeds."""
    first, *others = [
        {name: value for name, value in task.data.items() if name != "id"}
        for task in islice(tasks, LOOKED_AT)
    ] or [{}]
    if first and others and all(fields == first for fields in others):
        text = "the tasks of %s are alike: start() gets the same fields in each of the first %d"
        _log.warning(text, env_id, len(others) + 1)
