"""Say which code holds the event loop up, because no other episode goes on meanwhile."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from weakref import WeakKeyDictionary

from agentenv.core.visible import logger

__all__ = ["LoopWatch"]

HELD_UP_S = 3.0
"""Seconds without a turn of the event loop after which its code is named."""
_PERIOD_S = 0.5

_log = logger(__name__)
_LIBRARIES = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
"""Directories whose code is not the user's."""
_LOOP = str(Path(asyncio.__file__).parent)
_told: set[tuple[str, int]] = set()
_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWatch] = WeakKeyDictionary()


class LoopWatch:
    """Watches from a thread whether an event loop turns, while at least one user has it started."""

    def __init__(self) -> None:
        self._beat = 0.0
        self._users = 0
        self._over = threading.Event()

    @staticmethod
    def of_running_loop() -> LoopWatch:
        """Return the watch of the running event loop: a thousand runners on one loop have one thread."""
        return _watches.setdefault(asyncio.get_running_loop(), LoopWatch())

    def start(self) -> None:
        """Watch the event loop of this thread, which calls `beat` from time to time."""
        self._users += 1
        self.beat()
        if self._users > 1:
            return
        self._over = over = threading.Event()
        arguments = (over, threading.get_ident())
        threading.Thread(target=self._watch, args=arguments, name="loop watch", daemon=True).start()

    def beat(self) -> None:
        """Note that the event loop turns."""
        self._beat = time.monotonic()

    def stop(self) -> None:
        """Watch no more for one user."""
        self._users -= 1
        if not self._users:
            self._over.set()

    def _watch(self, over: threading.Event, thread: int) -> None:
        while not over.wait(_PERIOD_S):
            if (late_s := time.monotonic() - self._beat) > HELD_UP_S:
                frames = sys._current_frames()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
                self._tell(frames.get(thread), late_s)

    def _tell(self, frame: FrameType | None, late_s: float) -> None:
        """Name the innermost code of the user, once for each place."""
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            # Beyond the event loop is the program that started it, which waits.
            frame = None if frame.f_code.co_filename.startswith(_LOOP) else frame.f_back
        if frame is None:
            return
        code = frame.f_code
        if (place := (code.co_filename, code.co_firstlineno)) not in _told:
            _told.add(place)
            _log.warning(
                "%s (%s:%d) has held all episodes up for %.0f s: await what waits, or write it as a plain "
                "def, which runs in a thread of its own",
                code.co_qualname,
                code.co_filename,
                frame.f_lineno,
                late_s,
            )
