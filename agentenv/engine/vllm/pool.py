"""Several servers of one model behind one `post`: routing, retries, health.

1. An episode stays with its server, where its prefix is cached, as long as the server lives.
2. Only connection errors, 429 and 503 are tried again, for at most `retry_s` seconds: requests
   carry their seed and may be repeated.
3. A server that cannot be reached is taken out; it comes back after its health check answers and
   `restore` has put back what it had been given.
4. Cancelling a request closes its connection, which is what makes vLLM free it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp
from pydantic_core import from_json, to_json

from agentenv.core.errors import ContextTooLong, EngineError, EngineUnavailable

__all__ = ["Server", "ServerPool"]

BUSY = (429, 503)
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
KEEP_ALIVE_S = 4.0
"""Less than the 5 s after which vLLM closes an idle connection, or requests would meet closed ones."""
CONTEXT_WORDS = ("maximum context length", "context length", "max_model_len", "maximum model length")


@dataclass(slots=True, eq=False)
class Server:
    """One server and what is known about it."""

    url: str
    """Without a slash at the end, and without `/v1`."""
    alive: bool = True
    sessions: int = 0
    in_flight: int = 0
    failures: int = 0
    """Times it was found unreachable."""
    watcher: asyncio.Task[None] | None = field(default=None, repr=False)


class ServerPool:
    """Post JSON to whichever server an episode belongs to.

    Args:
        urls: servers of the same model.
        concurrency: requests in flight to each server; the others wait.
        retry_s: for how long an unreachable or busy server is tried again.
        api_key: sent as a bearer token.
        restore: called with a server that came back, before it is used again.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        concurrency: int = 256,
        retry_s: float = 120.0,
        api_key: str | None = None,
        restore: Callable[[Server], Awaitable[None]] | None = None,
    ) -> None:
        self.servers = [Server(url) for url in urls]
        self._concurrency = concurrency
        self._retry_s = retry_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._restore = restore
        self._sticky: dict[str, Server] = {}
        self._http: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Condition()
        self._waiting = 0
        """Requests that wait for a server with room."""

    async def post(
        self, path: str, body: Mapping[str, Any], *, session_id: str | None = None
    ) -> tuple[dict[str, Any], float]:
        """Post to the episode's server; return the answer and how long the request had to wait.

        Raises:
            ContextTooLong: The server says that the prompt does not fit.
            EngineUnavailable: No server could be reached within `retry_s`.
            EngineError: The server refused the request, or answered nonsense.
        """
        self._session()
        began = monotonic()
        pause = FIRST_PAUSE_S
        data = to_json(body)
        while True:
            server = await self._take(session_id, began)
            waited = monotonic() - began
            try:
                return await self._post_to(server, path, data), waited
            except EngineUnavailable as error:
                if monotonic() - began + pause > self._retry_s:
                    raise EngineUnavailable(
                        f"{error}; gave up after {monotonic() - began:.0f} s (retry_s={self._retry_s:g})"
                    ) from None
            finally:
                await self._give_back(server)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def post_all(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Post the same order to every server; one that is away is waited for, for `retry_s`."""
        return list(await asyncio.gather(*(self._insist(server, path, body) for server in self.servers)))

    async def _insist(self, server: Server, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._session()
        began = monotonic()
        while True:
            try:
                return await self.post_one(server, path, body)
            except EngineUnavailable:
                if monotonic() - began + FIRST_PAUSE_S > self._retry_s:
                    raise
            await asyncio.sleep(FIRST_PAUSE_S)
            async with self._changed:
                with suppress(TimeoutError):
                    left = self._retry_s - (monotonic() - began)
                    await asyncio.wait_for(self._changed.wait_for(lambda: server.alive), left)

    async def post_one(self, server: Server, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post an order to one server, once; an answer that is no JSON object counts as empty."""
        return await self._post_to(server, path, to_json(body), order=True)

    async def get(self, server: Server, path: str) -> dict[str, Any]:
        """Get JSON from one server, once."""
        try:
            async with self._session().get(server.url + path, timeout=aiohttp.ClientTimeout(10)) as reply:
                return self._read(server, path, reply.status, await reply.read(), order=True)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreachable(server, error) from error

    def release(self, session_id: str) -> None:
        """Forget where an episode went."""
        server = self._sticky.pop(session_id, None)
        if server is not None:
            server.sessions -= 1

    async def close(self) -> None:
        """Close all connections."""
        for server in self.servers:
            if server.watcher is not None:
                server.watcher.cancel()
                server.watcher = None
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _post_to(
        self, server: Server, path: str, data: bytes, *, order: bool = False
    ) -> dict[str, Any]:
        try:
            async with self._session().post(server.url + path, data=data) as reply:
                return self._read(server, path, reply.status, await reply.read(), order=order)
        except (aiohttp.ClientError, OSError) as error:
            await self._mark_dead(server)
            raise unreachable(server, error) from error

    def _read(self, server: Server, path: str, status: int, content: bytes, *, order: bool) -> dict[str, Any]:
        if status in BUSY:
            raise EngineUnavailable(f"{server.url} is busy ({status})")
        try:
            answer: Any = from_json(content) if content.strip() else {}
        except ValueError:
            answer = None
        if status >= 400:
            said = message_of(answer) or content[:200].decode(errors="replace")
            if status == 400 and any(words in said for words in CONTEXT_WORDS):
                raise ContextTooLong(f"{server.url}: {said}")
            raise EngineError(f"{server.url}{path} answered {status}: {said}")
        if not isinstance(answer, dict):
            if order:
                return {}
            raise EngineError(f"{server.url}{path} answered no JSON object: {content[:80]!r}")
        return answer

    async def _take(self, session_id: str | None, began: float) -> Server:
        """Wait for a live server with room; the episode's own if it lives."""
        server = self._choose(session_id)
        while server is None:
            left = self._retry_s - (monotonic() - began)
            if left <= 0:
                dead = ", ".join(server.url for server in self.servers)
                raise EngineUnavailable(f"no server answers ({dead}) since {self._retry_s:g} s")
            self._waiting += 1
            try:
                async with self._changed:
                    with suppress(TimeoutError):
                        # Busy servers give room back; the wait is bounded for those that died.
                        await asyncio.wait_for(self._changed.wait(), min(left, LONGEST_PAUSE_S))
            finally:
                self._waiting -= 1
            server = self._choose(session_id)
            if any(other.alive for other in self.servers):
                began = monotonic()
        server.in_flight += 1
        return server

    def _choose(self, session_id: str | None) -> Server | None:
        own = None if session_id is None else self._sticky.get(session_id)
        if own is not None and own.alive:
            return own if own.in_flight < self._concurrency else None
        live = [server for server in self.servers if server.alive and server.in_flight < self._concurrency]
        if not live:
            return None
        server = min(live, key=lambda server: (server.sessions, server.in_flight))
        if session_id is not None:
            self.release(session_id)
            self._sticky[session_id] = server
            server.sessions += 1
        return server

    async def _give_back(self, server: Server) -> None:
        server.in_flight -= 1
        if self._waiting:
            async with self._changed:
                # With several servers the next in line may be waiting for another one.
                self._changed.notify(1 if len(self.servers) == 1 else self._waiting)

    async def _mark_dead(self, server: Server) -> None:
        if not server.alive:
            return
        server.alive = False
        server.failures += 1
        server.watcher = asyncio.get_running_loop().create_task(self._watch(server))

    async def _watch(self, server: Server) -> None:
        """Ask for health until a server answers, then put it back."""
        pause = FIRST_PAUSE_S
        while True:
            with suppress(EngineError):
                await self.get(server, "/health")
                if self._restore is not None:
                    await self._restore(server)
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        async with self._changed:
            server.alive = True
            server.watcher = None
            self._changed.notify_all()

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            self._loop = loop
            self._changed = asyncio.Condition()
            for server in self.servers:
                server.alive, server.watcher, server.in_flight = True, None, 0
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                headers={"Content-Type": "application/json", **self._headers},
            )
        return self._http


def unreachable(server: Server, error: BaseException) -> EngineUnavailable:
    """Return the error that says a server could not be reached."""
    return EngineUnavailable(f"{server.url} cannot be reached: {type(error).__name__}: {error}")


def message_of(answer: Any) -> str:
    """Return what a server says is wrong, in the shapes that vLLM and OpenAI use."""
    if not isinstance(answer, dict):
        return ""
    error = answer.get("error", answer)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return error if isinstance(error, str) else json.dumps(error)
