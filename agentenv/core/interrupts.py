"""SIGTERM does what Ctrl-C does, also where a shell has Ctrl-C ignored, as in its background jobs.

asyncio makes a handler of Ctrl-C, which cancels what runs, only where it is not ignored. Elsewhere this keeps
that handler for SIGTERM: what is raised in the midst of a coroutine would be taken for the coroutine's own.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

__all__ = ["ctrl_c", "run_ignoring", "unheard"]

unheard: list[Any] = []
"""asyncio's handler of Ctrl-C while `run_ignoring` runs; empty otherwise."""


def ctrl_c() -> Callable[[int, FrameType | None], Any]:
    """Return Ctrl-C's handler: it cancels what `run_blocking` runs, and then raises KeyboardInterrupt."""
    handler = signal.getsignal(signal.SIGINT)
    return handler if callable(handler) else [*unheard, signal.default_int_handler][0]


def run_ignoring(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine as `asyncio.run` does, in a process that ignores Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(coroutine)
    with asyncio.Runner() as runner:
        runner.get_loop().call_soon(lambda: unheard.append(signal.signal(signal.SIGINT, signal.SIG_IGN)))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return runner.run(coroutine)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            unheard.clear()
