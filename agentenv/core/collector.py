"""Keep Python's cycle collector from walking over all live episodes again and again.

By default a collection starts after 700 new containers, and every hundredth of these walks over everything
that is alive. With hundreds of live episodes that is a seventh of a run's processor time, although episodes
make next to no cycles.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock

__all__ = ["fewer_collections"]

THRESHOLDS = (10_000, 5, 2)
"""New containers before a collection, and collections of the younger generation before one of the next."""

_lock = Lock()
_users = 0
_before: tuple[int, int, int] | None = None
_frozen = False


@contextmanager
def fewer_collections() -> Generator[None]:
    """Collect less often within the block, and leave out what was alive at its start.

    Blocks may overlap, in one thread or in several; the last one to end restores what was before the first.
    A collector that was turned off stays so, and objects that the caller froze stay frozen.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _users, _before, _frozen  # noqa: PLW0603 - the collector is one for the whole process
    with _lock:
        _users += 1
        if _users > 1 or not gc.isenabled():
            return
        before = gc.get_threshold()
        if before[0] and before < THRESHOLDS:
            _before = before
            gc.set_threshold(*THRESHOLDS)
        if not gc.get_freeze_count():
            _frozen = True
            gc.freeze()


def _leave() -> None:
    global _users, _before, _frozen  # noqa: PLW0603 - the collector is one for the whole process
    with _lock:
        _users -= 1
        if _users:
            return
        # Thresholds that other code has set meanwhile are its own.
        if _before is not None and gc.get_threshold() == THRESHOLDS:
            gc.set_threshold(*_before)
        if _frozen:
            gc.unfreeze()
        _before, _frozen = None, False
