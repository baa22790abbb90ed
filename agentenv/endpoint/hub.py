"""One server for all sessions of an event loop, which listens while there is a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from agentenv.endpoint.server import Endpoint, serve_sessions
from agentenv.endpoint.session import Session

__all__ = ["session_url"]


@dataclass(slots=True)
class _Hub:
    """The server of an event loop."""

    # Invariant: the server listens exactly while `users` is positive, outside of the lock.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    endpoint: Endpoint | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def enter(self) -> Endpoint:
        """Start the server if nobody uses it yet."""
        async with self.lock:
            if self.endpoint is None:
                self.endpoint = await self.stack.enter_async_context(serve_sessions())
            self.users += 1
            return self.endpoint

    async def leave(self) -> None:
        """Stop the server if nobody uses it any more."""
        async with self.lock:
            self.users -= 1
            if not self.users:
                self.endpoint = None
                await self.stack.aclose()


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, _Hub] = WeakKeyDictionary()


@asynccontextmanager
async def session_url(session: Session) -> AsyncGenerator[str]:
    """Serve a session while the block runs, and yield its address.

    OpenAI's SDKs take the address with `/v1` at its end, Anthropic's take it as it is.
    """
    hub = _hubs.setdefault(asyncio.get_running_loop(), _Hub())
    endpoint = await hub.enter()
    secret = endpoint.open(session)
    try:
        yield endpoint.url_of(secret)
    finally:
        await endpoint.close(secret)
        await asyncio.shield(hub.leave())
