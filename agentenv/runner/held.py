"""What an attempt at an episode holds: the sandbox lent to it, and how everything is given back.

Rules:

1. What is held is closed to the end and within a time limit, also while the episode is being cancelled.
2. One task enters and leaves the context manager of a sandbox pool, so that the pool may hold timeouts
   and task groups of its own, and so that an episode cancelled half-way gives back what it had, or was
   about to get.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol, runtime_checkable

from agentenv.core.execution import SandboxProtocol

__all__ = ["Closing", "Lease", "SandboxPool", "own_pool"]

_log = logging.getLogger(__name__)


@runtime_checkable
class SandboxPool(Protocol):
    """Lends sandboxes; every `agentenv.sandbox.Sandbox` does."""

    def lease(self) -> AbstractAsyncContextManager[SandboxProtocol]:
        """Lend a clean sandbox until the context is left."""
        ...


async def own_pool(name: str | None, stack: AsyncExitStack) -> SandboxPool | None:
    """Open the sandbox that an environment's spec names, until the stack is left; None for none."""
    if name is None:
        return None
    from agentenv.sandbox.base import create

    return await stack.enter_async_context(create(name))


class Lease:
    """One sandbox of a pool, from `take` to `give_back`.

    Args:
        pool: lends it.
        timeout_s: that whoever waits for it allows.
    """

    # Invariant: `take` sets `_lent` and `_keeper` together. `_lent` is pending while the pool is asked, then
    # holds the sandbox or what the pool raised; it is cancelled when nobody waits for a sandbox any more.
    __slots__ = ("_keeper", "_lent", "_over", "_pool", "timeout_s")

    def __init__(self, pool: SandboxPool, timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s
        self._pool = pool
        self._over = asyncio.Event()
        self._lent: asyncio.Future[SandboxProtocol] | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def take(self) -> SandboxProtocol:
        """Wait for a sandbox; raises what the pool raised."""
        self._lent = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(self._lent))
        return await self._lent

    async def _keep(self, lent: asyncio.Future[SandboxProtocol]) -> None:
        try:
            async with self._pool.lease() as mine:
                if not lent.done():
                    lent.set_result(mine)
                    await self._over.wait()
        except (Exception, SystemExit) as error:  # handed to whoever waits: the boundary is theirs
            if lent.done():
                raise  # what fails after the sandbox was lent is raised by `give_back`
            lent.set_exception(error)
        finally:
            lent.cancel()  # does nothing to a future that is done

    async def give_back(self) -> None:
        """Leave the pool's context, whatever became of the episode; raises what that raised."""
        keeper, lent = self._keeper, self._lent
        if keeper is None or lent is None:
            return
        self._over.set()
        if lent.cancelled():
            # Nobody waits for it any more, and it may be far from being lent.
            keeper.cancel()
        try:
            await asyncio.wait({keeper})
        except asyncio.CancelledError:
            keeper.cancel()
            raise
        if not keeper.cancelled():
            keeper.result()


class Closing:
    """Closes things of episodes whose records are already made: failures are only logged.

    Args:
        timeout_s: for each thing.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # Invariant: a closing stands here until it is done, also when whoever asked for it was cancelled.
        # The event loop holds tasks only weakly, and `wait` must find those that nobody awaits.
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
