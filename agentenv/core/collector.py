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

__all__ = ["collect_rarely", "fewer_collections"]

THRESHOLDS = (10_000, 5, 2)
"""New containers before a collection, and collections of the younger generation before one of the next."""

_lock = Lock()
_users = 0
_before: tuple[int, int, int] | None = None
_frozen = False
_for_good = False


def collect_rarely(*, one_run: bool = False) -> None:
    """Collect less often until the process ends. Programs call this at their start; libraries do not.

    Args:
        one_run: the program plays one run and exits, so what was alive when the run began is left out at the
            exit, too. Walking over all modules there takes a fifth of the time of a small evaluation.
            What the run itself made is collected at the exit as always.
    """
    global _for_good  # noqa: PLW0603 - the collector is one for the whole process
    gc.set_threshold(*THRESHOLDS)
    _for_good = one_run


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
        if _frozen and not _for_good:
            gc.unfreeze()
        _before, _frozen = None, False
