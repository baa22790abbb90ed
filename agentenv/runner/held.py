"""Resources that an attempt at an episode holds: its sandbox, and how everything is closed.

Rules:

1. Every resource is closed completely, within a time limit, even if the episode is cancelled meanwhile.
2. The same task enters and leaves the context manager of a sandbox pool. The pool can then use timeouts
   and task groups, and an episode that is cancelled returns the sandbox that it had or was about to get.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol, runtime_checkable

from agentenv.core.execution import SandboxProtocol
from agentenv.core.faults import must_pass, traceback_of

__all__ = ["Closing", "Lease", "SandboxPool", "own_pool"]

_log = logging.getLogger(__name__)


@runtime_checkable
class SandboxPool(Protocol):
    """Lends sandboxes; every `agentenv.sandbox.Sandbox` is such a pool."""

    def lease(self) -> AbstractAsyncContextManager[SandboxProtocol]:
        """Lend a clean sandbox until the context is left."""
        ...


async def own_pool(name: str | None, stack: AsyncExitStack) -> SandboxPool | None:
    """Open the sandbox named in an environment's spec until the stack closes; return None for no name."""
    if name is None:
        return None
    from agentenv.sandbox.base import create

    return await stack.enter_async_context(create(name))


class Lease:
    """One sandbox of a pool, from `take` to `give_back`.

    Args:
        pool: pool that lends the sandbox.
        timeout_s: time limit with which the episode awaits `take`.
    """

    # Invariant: `take` sets `_lent` and `_keeper` together. `_lent` is pending until the pool answers, then
    # it holds the sandbox or the pool's exception. It is cancelled when nobody waits for a sandbox any more.
    __slots__ = ("_failure", "_keeper", "_lent", "_over", "_pool", "timeout_s")

    def __init__(self, pool: SandboxPool, timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s
        self._pool = pool
        self._over = asyncio.Event()
        self._lent: asyncio.Future[SandboxProtocol] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        """Exception of the pool after it lent the sandbox. It is not raised in the keeper's task, because a
        `SystemExit` in a task ends the event loop."""

    async def take(self) -> SandboxProtocol:
        """Wait for a sandbox; an exception of the pool is raised here."""
        self._lent = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(self._lent))
        return await self._lent

    async def _keep(self, lent: asyncio.Future[SandboxProtocol]) -> None:
        try:
            async with self._pool.lease() as sandbox:
                if not lent.done():
                    lent.set_result(sandbox)
                    await self._over.wait()
        except BaseException as error:  # passed to the waiting episode, whose guard classifies it
            if must_pass(error):
                raise
            if lent.done():
                self._failure = error
            else:
                lent.set_exception(error)
        finally:
            lent.cancel()  # does nothing to a future that is done

    async def give_back(self) -> None:
        """Leave the pool's context, however the episode ended; an exception of the pool is raised here."""
        keeper, lent = self._keeper, self._lent
        if keeper is None or lent is None:
            return
        self._over.set()
        if lent.cancelled():
            # Nobody waits for the sandbox any more, and the pool may not lend it for a long time.
            keeper.cancel()
        try:
            await asyncio.wait({keeper})
        except asyncio.CancelledError:
            keeper.cancel()
            raise
        if self._failure is not None:
            raise self._failure


class Closing:
    """Closes resources of episodes whose records are complete; failures are only logged.

    Args:
        timeout_s: time limit for closing each resource, and then for code to react to its cancellation.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # Invariant: a closing task is in this set until it is done, even if its caller was cancelled. The
        # event loop holds tasks only weakly, and `wait` must find the tasks that nobody awaits.
        self._running: set[asyncio.Task[None]] = set()
        self._abandoned: set[asyncio.Task[BaseException | None]] = set()

    async def close(self, what: str, close: Callable[[], Awaitable[object]]) -> None:
        """Close one resource; whatever its code raises is logged with the resource's name.

        The code runs in a task of its own: if it cancels its caller, or raises a `CancelledError`, then only
        its own task ends, and neither a finished record nor the other resources are lost.
        """
        task = asyncio.create_task(_failure_of(close))
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            _log.warning("closing %s took longer than %g s and was cancelled", what, self._timeout_s)
            await asyncio.wait({task}, timeout=self._timeout_s)
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
        elif task.cancelled():
            _log.warning("closing %s failed: its code cancelled the task in which it ran", what)
        elif (error := task.result()) is not None:
            _log.warning("closing %s failed:\n%s", what, traceback_of(error))

    async def settle(self, closing: Coroutine[object, object, None]) -> None:
        """Run a closing to its end, even if the episode that waits for it is cancelled."""
        task = asyncio.create_task(closing)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    async def wait(self) -> None:
        """Wait for the closings that are still running."""
        while self._running:
            await asyncio.wait(set(self._running))


async def _failure_of(close: Callable[[], Awaitable[object]]) -> BaseException | None:
    """Await a closing and return what its code raised; None if it raised nothing."""
    try:
        await close()
    except BaseException as error:
        if must_pass(error):
            raise
        return error
    return None
