"""Ctrl-C, which SIGTERM imitates, also where a shell has it ignored, as in its background jobs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["ctrl_c", "unheard"]

unheard: list[Any] = []
"""The handler that asyncio made for what `run_blocking` runs, while Ctrl-C is ignored; empty otherwise."""


def ctrl_c() -> Callable[[int, FrameType | None], Any]:
    """Return the handler of Ctrl-C: the first time it cancels what runs, later it raises KeyboardInterrupt.

    Where Ctrl-C is ignored, it cancels only what `run_blocking` runs; for anything else it raises at once.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        handler = unheard[0] if unheard else signal.default_int_handler
    return handler
