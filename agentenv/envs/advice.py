"""What the author of an environment most likely forgot: told once for a class, wherever it is played."""

from __future__ import annotations

import inspect
from weakref import WeakKeyDictionary

from agentenv.core.visible import logger

__all__ = ["tell_once", "unmarked_methods"]

_log = logger(__name__)
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
