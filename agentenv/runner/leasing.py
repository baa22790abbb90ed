"""A sandbox of its own for each attempt at an episode, lent by a pool and always given back.

One task enters and leaves the pool's context manager, so that it may hold timeouts and task groups
of its own, and so that an episode cancelled half-way gives back what it had, or was about to get.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol, runtime_checkable

from agentenv.core.execution import SandboxProtocol

__all__ = ["Lease", "SandboxPool", "own_pool"]


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
                raise
            lent.set_exception(error)
        finally:
            lent.cancel()

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
