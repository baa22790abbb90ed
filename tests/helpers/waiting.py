"""Wait for what no event tells: another process's doing, a thread's end, a file, a log."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 90.0
"""Time after which a condition is taken as never coming true, on a busy machine too."""
LOOK_EVERY_S = 0.005


async def until(condition: Callable[[], T | Awaitable[T]], *, seconds: float = PATIENCE_S) -> T:
    """Return the condition's value as soon as it is true, while the loop goes on.

    Raises:
        TimeoutError: It did not become true in time.
    """
    async with asyncio.timeout(seconds):
        while True:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(LOOK_EVERY_S)


def wait_until(condition: Callable[[], T], *, seconds: float = PATIENCE_S) -> T:
    """Return the condition's value as soon as it is true, blocking this thread.

    Raises:
        TimeoutError: It did not become true in time.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition is still {value!r} after {seconds:g} s")
        time.sleep(LOOK_EVERY_S)
    return value


async def let_others_run(turns: int = 20) -> None:
    """Give every other task of the loop that can go on the chance to."""
    for _ in range(turns):
        await asyncio.sleep(0)
