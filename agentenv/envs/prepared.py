"""What an environment's `prepare` opens, shared by all stages that play the environment at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

__all__ = ["prepared"]


@dataclass(slots=True)
class _Preparation:
    """What `prepare` made, for all stages that play the environment at the same time."""

    users: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    stack: AsyncExitStack | None = None


_preparations: dict[Hashable, _Preparation] = {}


@asynccontextmanager
async def prepared(prepare: Callable[[], Any], key: Hashable) -> AsyncGenerator[None]:
    """Await what `prepare` returns, or enter it, while no other stage of this event loop has done so.

    Args:
        prepare: returns a coroutine or an asynchronous context manager.
        key: what the preparation is for; the last of its users leaves the context manager.
    """
    key = (asyncio.get_running_loop(), key)
    held = _preparations.setdefault(key, _Preparation())
    held.users += 1
    try:
        async with held.lock:
            if held.stack is None:
                async with AsyncExitStack() as stack:
                    begun = prepare()
                    if isinstance(begun, AbstractAsyncContextManager):
                        await stack.enter_async_context(cast("AbstractAsyncContextManager[Any]", begun))
                    else:
                        await begun
                    held.stack = stack.pop_all()
        yield
    finally:
        held.users -= 1
        if not held.users:
            del _preparations[key]
            if held.stack is not None:
                await held.stack.aclose()
