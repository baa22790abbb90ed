"""A pool of servers of one model, which routes requests, retries them and watches the servers.

1. An episode stays with one server, where its prefix is cached, as long as that server is alive.
2. Only connection errors and the statuses 429 and 503 are retried, for at most `retry_s` seconds.
   This is safe, because each request contains its seed.
3. A server that cannot be reached is not used. It is used again once its health check answers and
   `restore` has loaded its weights and adapters again.
4. Cancelling a request closes its connection, upon which vLLM frees the request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import SystemRandom
from time import monotonic
from typing import Any

import aiohttp
from pydantic_core import from_json, to_json

from agentenv.core.errors import ContextTooLong, EngineError, EngineUnavailable

__all__ = ["Server", "ServerPool"]

BUSY = (429, 503)
"""HTTP statuses of a server that is overloaded."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
KEEP_ALIVE_S = 4.0
"""Less than the 5 s after which vLLM closes an idle connection, so that we never use a closed one."""
CONTEXT_WORDS = ("maximum context length", "context length", "max_model_len", "maximum model length")


@dataclass(slots=True, eq=False)
class Server:
    """A server and its current state."""

    url: str
    """Address without `/v1` and without a slash at the end."""
    alive: bool = True
    """False from a failed connection until the server is restored."""
    sessions: int = 0
    """Number of episodes that belong to the server."""
    in_flight: int = 0
    """Number of requests that the server is working on."""
    failures: int = 0
    """How often the server became unreachable."""
    watcher: asyncio.Task[None] | None = field(default=None, repr=False)
    """Task that checks the health of an unreachable server."""


class ServerPool:
    """Posts JSON to the server to which an episode belongs.

    Args:
        urls: servers of the same model.
        concurrency: most requests in flight to each server; further requests wait.
        retry_s: seconds for which requests to an unreachable or busy server are retried.
        api_key: key that is sent as a bearer token.
        restore: function that is called with a server that answers again, before it is used.
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
        self._ties = SystemRandom()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._restore = restore
        self._sticky: dict[str, Server] = {}
        self._http: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Condition()
        self._waiting = 0
        """Number of requests that wait for a server with free capacity."""

    async def post(
        self, path: str, body: Mapping[str, Any], *, session_id: str | None = None
    ) -> tuple[dict[str, Any], float]:
        """Post to the server of the episode; return the answer and the seconds that the request waited.

        Raises:
            ContextTooLong: The server says that the prompt does not fit.
            EngineUnavailable: No server could be reached within `retry_s`.
            EngineError: The server refused the request, or its answer is not a JSON object.
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
        """Post the same command to every server; an unreachable server is retried for `retry_s` seconds."""
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
        """Post a command to one server, once; an answer that is not a JSON object counts as empty."""
        return await self._post_to(server, path, to_json(body), command=True)

    async def get(self, server: Server, path: str) -> dict[str, Any]:
        """Get JSON from one server, once."""
        try:
            async with self._session().get(server.url + path, timeout=aiohttp.ClientTimeout(10)) as reply:
                return self._read(server, path, reply.status, await reply.read(), command=True)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreachable(server, error) from error

    def release(self, session_id: str) -> None:
        """Forget to which server an episode belongs."""
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
        self, server: Server, path: str, data: bytes, *, command: bool = False
    ) -> dict[str, Any]:
        try:
            async with self._session().post(server.url + path, data=data) as reply:
                return self._read(server, path, reply.status, await reply.read(), command=command)
        except (aiohttp.ClientError, OSError) as error:
            await self._mark_dead(server)
            raise unreachable(server, error) from error

    def _read(
        self, server: Server, path: str, status: int, content: bytes, *, command: bool
    ) -> dict[str, Any]:
        if status in BUSY:
            raise EngineUnavailable(f"{server.url} is busy (status {status})")
        try:
            answer: Any = from_json(content) if content.strip() else {}
        except ValueError:
            answer = None
        if status >= 400:
            reason = message_of(answer) or content[:200].decode(errors="replace")
            if status == 400 and any(words in reason for words in CONTEXT_WORDS):
                raise ContextTooLong(f"{server.url}: {reason}")
            raise EngineError(f"{server.url}{path} answered with status {status}: {reason}")
        if not isinstance(answer, dict):
            if command:
                return {}
            raise EngineError(f"the answer of {server.url}{path} is not a JSON object: {content[:80]!r}")
        return answer

    async def _take(self, session_id: str | None, began: float) -> Server:
        """Wait for a live server with free capacity; an episode keeps its own server while that is alive."""
        server = self._choose(session_id)
        while server is None:
            left = self._retry_s - (monotonic() - began)
            if left <= 0:
                dead = ", ".join(server.url for server in self.servers)
                raise EngineUnavailable(f"no server has answered for {self._retry_s:g} s ({dead})")
            self._waiting += 1
            try:
                async with self._changed:
                    with suppress(TimeoutError):
                        # A busy server notifies when it has capacity; a dead one does not, so limit the wait.
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
        # Each process counts only its own requests, so without a random order the ties of all processes
        # would go to the first server.
        server = min(live, key=lambda server: (server.sessions, server.in_flight, self._ties.random()))
        if session_id is not None:
            self.release(session_id)
            self._sticky[session_id] = server
            server.sessions += 1
        return server

    async def _give_back(self, server: Server) -> None:
        server.in_flight -= 1
        if self._waiting:
            async with self._changed:
                # With several servers, the next request may wait for a different one, so all are notified.
                self._changed.notify(1 if len(self.servers) == 1 else self._waiting)

    async def _mark_dead(self, server: Server) -> None:
        if not server.alive:
            return
        server.alive = False
        server.failures += 1
        server.watcher = asyncio.get_running_loop().create_task(self._watch(server))

    async def _watch(self, server: Server) -> None:
        """Check the health of a server until it answers, then restore it and use it again."""
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
    """Return the error for a server that could not be reached."""
    return EngineUnavailable(f"{server.url} cannot be reached: {type(error).__name__}: {error}")


def message_of(answer: Any) -> str:
    """Return the error message in an answer, in the forms that vLLM and OpenAI use."""
    if not isinstance(answer, dict):
        return ""
    error = answer.get("error", answer)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return error if isinstance(error, str) else json.dumps(error)
