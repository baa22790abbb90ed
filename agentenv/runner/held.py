"""Closing what an episode held: to the end, within a time limit, also while it is being cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine

__all__ = ["Closing"]

_log = logging.getLogger(__name__)


class Closing:
    """Closes things of episodes whose records are already made: failures are only logged.

    Args:
        timeout_s: for each thing.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._running: set[asyncio.Task[None]] = set()

    async def close(self, what: str, close: Callable[[], Awaitable[object]]) -> None:
        """Close one thing; what it raises is logged with its name.

        A `CancelledError` of its own (an author cancels a task and awaits it) is a failure like any other:
        passed on, it would look like a cancelled episode, and the finished one would be lost.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await close()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            _log.warning("closing %s failed", what, exc_info=True)
        except (Exception, SystemExit):  # noqa: BLE001 - the boundary of closing
            _log.warning("closing %s failed", what, exc_info=True)

    async def settle(self, closing: Coroutine[object, object, None]) -> None:
        """Run a closing to its end, also when the episode that waits for it is cancelled."""
        task = asyncio.create_task(closing)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    async def wait(self) -> None:
        """Wait for the closings that nobody waits for any more."""
        while self._running:
            await asyncio.wait(set(self._running))
