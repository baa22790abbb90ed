"""An event loop whose clock jumps to the next timer instead of waiting, so that sleeping costs no time."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Moves the clock on by the time that the loop wants to wait, if nothing has happened."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(None if timeout is None else 0)
        if not events and timeout:
            self.now += timeout
        return events


def run_in_virtual_time(make: Callable[[], Coroutine[Any, Any, T]], monkeypatch: pytest.MonkeyPatch) -> T:
    """Run a coroutine on a loop with a virtual clock, which `time.perf_counter` shows too.

    Nothing in it may wait for a thread: the clock would jump meanwhile.
    """
    selector = _Jumping()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    with monkeypatch.context() as patched, asyncio.Runner(loop_factory=lambda: loop) as runner:
        patched.setattr(time, "perf_counter", loop.time)
        return runner.run(make())
