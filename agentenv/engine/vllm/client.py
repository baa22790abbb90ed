"""JSON requests to vLLM servers: each has a time limit, and each failure is an error that says its kind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2s
from math import inf
from typing import Any

import aiohttp
from pydantic_core import from_json

from agentenv.core.errors import ContextTooLong, EngineError, EngineUnavailable
from agentenv.engine.answers import bounded, message_of, read_bounded
from agentenv.engine.labels import Label
from agentenv.engine.vllm.events import JoinedStream

__all__ = [
    "ModelMissing",
    "Server",
    "ServerClient",
    "Silent",
    "Unreachable",
    "WeightsTaken",
]

BUSY = (429, 503)
"""HTTP statuses of a server that is overloaded."""
NOT_FOUND = 404
SESSION_HEADER = "x-session-id"
"""Header by which routers, such as vLLM's, keep the requests of an episode on one server."""
CONNECT_S = 10.0
"""Time limit for opening a connection."""
MAX_BYTES = 256_000_000
"""Most bytes of an answer: with the supports or the experts of its tokens it has up to thousands a token."""
KEEP_ALIVE_S = 4.0
"""Less than the 5 s after which vLLM closes an idle connection, so that we never use a closed one."""
CONTEXT_WORDS = ("maximum context length", "context length", "max_model_len", "maximum model length")


class Unreachable(EngineUnavailable):
    """The connection to a server failed."""


class Silent(EngineUnavailable):
    """A server did not answer within the time limit, or was taken out of use before it answered."""


class ModelMissing(EngineError):
    """A server has no model or adapter of this name."""


class WeightsTaken(EngineError):
    """A server has the weights of another training."""

    @classmethod
    def of(cls, url: str, owner: Label) -> WeightsTaken:
        """Return the error for a server and the label that it has."""
        since = f" since {owner.since}" if owner.since else ""
        return cls(
            f"{url} has the weights of the training {owner.training or 'of another process'}{since}",
            remedy="wait until it has ended, name another server, or end it by taking the server over: "
            "-o engine.take_over=true",
        )


@dataclass(slots=True, eq=False)
class Server:
    """A server and its current state."""

    url: str
    """Address without `/v1` and without a slash at the end."""
    alive: bool = True
    """Whether the server is used: it answers, and it has the expected weights."""
    problem: str = ""
    """Why the server is not used; empty if it is."""
    taken: WeightsTaken | None = None
    """Why the server is not used if another training has pushed its weights to it."""
    restoring: bool = False
    """Whether this process is bringing the expected weights back to the server."""
    updating: bool = False
    """Whether this process is changing the server's weights."""
    tainted: bool = False
    """Whether the weights may differ from their label, because an update of this process failed."""
    leaving: bool = False
    """Whether the server is on the list no more: it ends what it has begun, and gets nothing new."""
    stuck: bool = False
    """Whether the server must sample a token before it is used again, because it answered only checks."""
    sessions: int = 0
    """Number of episodes that belong to the server."""
    in_flight: int = 0
    """Number of requests that the server is working on."""
    failures: int = 0
    """How often the server was taken out of use."""
    silent_s: float = 0.0
    """Seconds that checks have waited for the server since its last answer."""
    answered: float = -inf
    """Time of its last completion, by `time.monotonic()`."""
    confirmed: float = -inf
    """Time at which it was last checked that it has the expected weights."""
    due: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set to have the server checked at once."""
    watcher: asyncio.Task[None] | None = field(default=None, repr=False)
    """Task that checks the server for as long as the connections are open."""
    limits: set[asyncio.Timeout] = field(default_factory=set[asyncio.Timeout], repr=False)
    """Time limits of the requests in flight; a request ends when its limit is set to now."""

    def facts(self) -> dict[str, Any]:
        """Return what a run records of the server, without its full address, which may hold a password."""
        name = self.url.rpartition("/")[2].rpartition("@")[2]
        return {
            "server": name,
            "used": self.alive,
            "sessions": self.sessions,
            "in_flight": self.in_flight,
            "failures": self.failures,
            "problem": self.problem.replace(self.url, name),
        }

    def end_requests(self) -> None:
        """End the requests in flight; each raises `Silent`."""
        now = asyncio.get_running_loop().time()
        for limit in self.limits:
            if not limit.expired():
                limit.reschedule(now)


class ServerClient:
    """Sends requests over the connections of the current event loop.

    Args:
        api_key: key that is sent as a bearer token.
        socket: path of the socket file on which the server listens; empty for the network.
    """

    def __init__(self, api_key: str | None = None, *, socket: str = "") -> None:
        self._socket = socket
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> bool:
        """Open connections for this event loop; return False if they were open already."""
        loop = asyncio.get_running_loop()
        if self._http is not None and self._loop is loop:
            return False
        self._loop = loop
        kind = partial(aiohttp.UnixConnector, self._socket) if self._socket else aiohttp.TCPConnector
        self._http = aiohttp.ClientSession(
            connector=kind(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers={"Content-Type": "application/json", **self._headers},
        )
        return True

    async def close(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def post(
        self,
        server: Server,
        path: str,
        data: bytes,
        *,
        limit_s: float,
        session_id: str | None = None,
        command: bool = False,
        joined: JoinedStream | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> dict[str, Any]:
        """Post JSON to a server, once.

        Args:
            server: the server.
            path: path and query of the request.
            data: the JSON.
            limit_s: time limit of the request.
            session_id: id of the episode, for a router between us and several servers.
            command: whether an answer that is not a JSON object counts as empty.
            joined: reads the answer if it is streamed.
            max_bytes: most bytes of the answer.

        Raises:
            EngineUnavailable: The server is busy, `Unreachable` or `Silent`.
            ContextTooLong: The server says that the prompt does not fit.
            EngineError: The server refused the request, or its answer is not a JSON object.
        """
        headers = None if session_id is None else {SESSION_HEADER: session_key(session_id)}
        status, content = await self._exchange(
            server, "POST", path, data, limit_s, headers=headers, joined=joined, max_bytes=max_bytes
        )
        if joined is not None and content is None:
            return joined.answer()
        return read_answer(server, path, status, content or b"", command=command)

    async def get(self, server: Server, path: str, *, limit_s: float) -> dict[str, Any]:
        """Get JSON from a server, once; the errors are those of `post`."""
        status, content = await self._exchange(server, "GET", path, None, limit_s)
        return read_answer(server, path, status, content or b"", command=True)

    async def reach(self, server: Server, *, limit_s: float) -> None:
        """Check that a server answers and is not failing; one without a health check passes too.

        Raises:
            EngineUnavailable: The server is busy, `Unreachable` or `Silent`.
            EngineError: The server says that it failed.
        """
        status, content = await self._exchange(server, "GET", "/health", None, limit_s)
        if status >= 500:
            read_answer(server, "/health", status, content or b"", command=True)

    async def _exchange(
        self,
        server: Server,
        method: str,
        path: str,
        data: bytes | None,
        limit_s: float,
        *,
        headers: dict[str, str] | None = None,
        joined: JoinedStream | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> tuple[int, bytes | None]:
        """Return the status and the content of an answer; None for one that `joined` has read."""
        if self._http is None:
            raise Unreachable(f"the connections to {server.url} are closed")
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                server.limits.add(limit)
                try:
                    async with self._http.request(
                        method, server.url + path, data=data, headers=headers
                    ) as reply:
                        answer = reply.status, await _content(reply, joined, min(max_bytes, MAX_BYTES))
                finally:
                    server.limits.discard(limit)
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            if not limit.expired():
                said = f"{type(error).__name__}: {error}"
                raise Unreachable(f"{server.url} cannot be reached: {said}") from error
            gone = server.problem and f"{server.url} was taken out of use: {server.problem}"
            raise Silent(gone or f"{server.url} did not answer {path} within {limit_s:g} s") from error
        server.silent_s = 0.0
        return answer


async def _content(
    reply: aiohttp.ClientResponse, joined: JoinedStream | None, max_bytes: int
) -> bytes | None:
    """Read an answer; one that is streamed is read by `joined`, and None is returned.

    Raises:
        EngineError: A streamed answer is no such answer, or the server failed meanwhile.
    """
    if joined is None or reply.status != 200 or reply.content_type != "text/event-stream":
        return await read_bounded(reply, max_bytes)
    try:
        async for data in bounded(reply.content, max_bytes):
            joined.feed(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"the answer of {reply.url} is no stream of completions: {error}") from error
    return None


def session_key(session_id: str) -> str:
    """Return a short text for a header; the ids of tasks in a session's id may have any characters."""
    return blake2s(session_id.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def read_answer(server: Server, path: str, status: int, content: bytes, *, command: bool) -> dict[str, Any]:
    """Return the JSON object of an answer; the errors are those of `ServerClient.post`."""
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
        wrong = ModelMissing if status == NOT_FOUND else EngineError
        raise wrong(f"{server.url}{path} answered with status {status}: {reason}")
    if not isinstance(answer, dict):
        if command:
            return {}
        raise EngineError(f"the answer of {server.url}{path} is not a JSON object: {content[:80]!r}")
    return answer
