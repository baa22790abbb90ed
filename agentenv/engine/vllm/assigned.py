"""The server that a driver has assigned to an episode.

Several processes that use the same servers each know their own episodes only, so none of them can spread all
episodes evenly. A driver can: it names a server for each episode, and the process that plays it keeps to that
server as long as it is used.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["assigned_server", "on_server"]

_assigned: ContextVar[int | None] = ContextVar("assigned_server", default=None)


@contextmanager
def on_server(number: int | None) -> Generator[None]:
    """Assign a server, by its index, to what this task and its children play; None assigns none."""
    before = _assigned.set(number)
    try:
        yield
    finally:
        _assigned.reset(before)


def assigned_server() -> int | None:
    """Return the index of the server that is assigned to the running episode."""
    return _assigned.get()
