"""Listen with aiohttp behind a guard, and answer whatever is wrong with a request in words."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from agentenv.core.errors import UsageError
from agentenv.core.serving.body import parse_json
from agentenv.core.serving.guard import JSON_TYPES, Guard, Refused
from agentenv.core.visible import logger

__all__ = ["Served", "guarded", "listen", "read_body", "read_object", "time_for_body"]

BODY_TIMEOUT_S = 30.0
"""Time that a client has to send a body, and to begin a request on an open connection."""
MAX_INFLATED = 32 << 20
"""Most bytes of a body that was sent compressed; a plain one costs its sender as much as its reader."""
MAX_RATIO = 20
"""Most bytes that one byte of a compressed body may become, beyond the first MiB; conversations become 5."""
_FAREWELL_S = 2.0
"""Time that a connection has to end once its last answer is sent."""
_log = logger(__name__)
_http_log = logger(f"{__name__}.http")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Served:
    """Where a server listens and what its clients send."""

    url: str
    """Address of the server, such as `http://127.0.0.1:8000`."""
    token: str = field(default="", repr=False)
    """Token that clients send; empty if the server has none."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers that a client sends with every request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def how_to_send(self, variable: str) -> str:
        """Return the line that tells a person how clients send the token.

        Args:
            variable: environment variable from which our own client reads the token.
        """
        if not self.token:
            return "it has no token: everyone who reaches this address can act"
        return f"token: {self.token}  (clients send it as a bearer token; ours read it from {variable})"


def _is_own_error(record: logging.LogRecord) -> bool:
    """Return whether a record of aiohttp is more than the news that a client sent no proper HTTP."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | RequestPayloadError)


_http_log.addFilter(_is_own_error)  # else every client could fill the log


def guarded(
    guard: Guard,
    *,
    public: Collection[str] = ("/health",),
    types: Callable[[web.Request], Iterable[str]] = lambda _: JSON_TYPES,
    tokens: Callable[[web.Request], Iterable[str]] = lambda _: (),
    query: str = "",
) -> Any:
    """Return aiohttp's middleware that asks the guard first and turns errors into answers.

    Args:
        guard: the rules of the server.
        public: paths that need no token; they must not act and must not tell a secret.
        types: content types that a request's body may have.
        tokens: further tokens that a request may carry instead of the guard's.
        query: parameter of the address that may hold the token, where a browser opens it; empty for none.
    """

    def check(request: web.Request) -> None:
        if not all(value.isascii() for value in request.headers.values()):
            raise Refused(400, "a header has characters beyond ASCII")
        guard.check_source(request.headers)
        if request.path not in public:
            in_address = request.query.get(query, "") if query else ""
            guard.check_token(request.headers, query=in_address, others=tokens(request))
        if request.can_read_body:
            guard.check_content_type(request.headers, types(request))

    @web.middleware
    async def ask_first(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            check(request)
            return await handler(request)
        except Exception as error:  # noqa: BLE001 - every error of a request is answered
            return _answer(error, request)

    return ask_first


def _answer(error: Exception, request: web.Request) -> web.StreamResponse:
    """Return the answer to a request that failed."""
    if isinstance(error, Refused):
        return _told(error.status, str(error))
    if isinstance(error, UsageError):
        return _told(422, str(error))
    if isinstance(error, TimeoutError):
        return _told(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s")
    if isinstance(error, HttpProcessingError | RequestPayloadError):
        return _told(400, f"the body cannot be read: {error}")
    if isinstance(error, web.HTTPException):
        return _told(error.status, f"{request.method} {request.path}: {error.reason}")
    if not isinstance(error, ConnectionError):  # the client has gone, so nobody reads the answer
        _log.exception("a request could not be answered", exc_info=error)
    return _told(500, f"{type(error).__name__}: {error}")


def _told(status: int, message: str) -> web.Response:
    # OpenEnv's clients read `detail`; E2B's read `code` and `message`.
    response = web.json_response({"detail": message, "code": status, "message": message}, status=status)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def time_for_body() -> asyncio.Timeout:
    """Return the time limit for reading a body, for `async with`."""
    return asyncio.timeout(BODY_TIMEOUT_S)


async def read_body(request: web.Request) -> bytes:
    """Return the body of a request.

    Raises:
        TimeoutError: The client sends it too slowly.
        web.HTTPRequestEntityTooLarge: It is larger than the application allows, as sent or inflated.
        UsageError: It cannot be inflated.
    """
    async with time_for_body():
        content = await request.read()
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding == "identity":
        return content
    if coding not in {"gzip", "deflate"}:
        raise Refused(
            415, f"bodies with the encoding {coding!r:.40} are not read", remedy="send gzip or none"
        )
    # A megabyte can hold a thousand: neither the event loop nor the memory is left to what a client packs.
    limit = min(MAX_INFLATED, request.client_max_size, max(1 << 20, MAX_RATIO * len(content)))
    return await asyncio.to_thread(_inflated, content, limit)


def _inflated(content: bytes, limit: int) -> bytes:
    # Without the head of zlib, which some clients leave out of `deflate`, the window has a negative size.
    inflater = zlib.decompressobj(47 if content[:1] and content[0] & 15 in {8, 15} else -15)
    try:
        plain = inflater.decompress(content, limit + 1)
    except zlib.error as error:
        raise UsageError(f"the body cannot be inflated: {error}") from None
    if len(plain) > limit:
        raise web.HTTPRequestEntityTooLarge(limit, len(plain))
    if not inflater.eof or inflater.unused_data:
        raise UsageError("the body does not end where its compressed data does")
    return plain


async def read_object(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in the body of a request.

    Raises:
        UsageError: The body is not a JSON object.
        TimeoutError: The client sends it too slowly.
    """
    value = parse_json(await read_body(request))
    if not isinstance(value, dict):
        raise UsageError("the body must be a JSON object")
    return value


@asynccontextmanager
async def listen(app: web.Application, guard: Guard, *, port: int = 0) -> AsyncGenerator[Served]:
    """Serve an application while the block runs.

    Args:
        app: the application, whose middlewares contain that of `guarded`.
        guard: the rules of the server, with the address at which it listens.
        port: port at which it listens; 0 chooses a free one.

    Raises:
        OSError: The port is in use.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        auto_decompress=False,  # `read_body` does so, off the event loop
        logger=_http_log,
        keepalive_timeout=BODY_TIMEOUT_S,
        lingering_time=_FAREWELL_S,
        shutdown_timeout=_FAREWELL_S,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, guard.host, port).start()
        host, bound = runner.addresses[0][:2]
        yield Served(f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}", guard.token)
    finally:
        await runner.cleanup()
