"""Find out whether an environment holds an object that only the thread which made it may use."""

from __future__ import annotations

import sys
from collections.abc import Iterator

__all__ = ["is_thread_bound"]


def is_thread_bound(env: object) -> bool:
    """Return whether an environment, or an object in its attributes, holds a SQLite connection or cursor."""
    sqlite3 = sys.modules.get("sqlite3")
    if sqlite3 is None:
        return False
    bound = (sqlite3.Connection, sqlite3.Cursor)
    own = list(_attributes(env))
    return any(
        isinstance(value, bound) for value in (*own, *(part for each in own for part in _attributes(each)))
    )


def _attributes(value: object) -> Iterator[object]:
    attributes = getattr(value, "__dict__", None)
    return iter(list(attributes.values()) if isinstance(attributes, dict) else [])
