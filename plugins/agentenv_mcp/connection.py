"""Connections to MCP servers, which outlive what breaks them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import IO, Any, cast

from agentenv.core import ServerUnavailable, ToolError, UsageError

__all__ = ["Connection", "dialer"]

_BROKEN_CODES = frozenset({-32000, -32001, -32700})
"""Codes of errors that say that the connection or the session is gone, or that no answer could be read."""
_BROKEN_WORDS = frozenset({"Session terminated", "Server returned an error response"})
"""What the client says of an HTTP status, under codes that servers use as well."""


def dialer(
    server: Any,
    log: IO[bytes],
    *,
    env: Mapping[str, str] | None,
    cwd: str | Path | None,
    headers: Mapping[str, str] | None,
    roots: Sequence[str | Path],
) -> Callable[[], AbstractAsyncContextManager[Any]]:
    """Return a function that opens a client of the server, as often as it is called."""
    is_command, is_url = isinstance(server, list | tuple), isinstance(server, str)
    if is_url and "://" not in server:
        raise UsageError(f"{server!r} is no URL", remedy="give a command as a list of words")
    if (env or cwd) and not is_command:
        raise UsageError(
            f"env= and cwd= need a command as a list of words, and the server is {server!r:.100}"
        )
    if headers and not is_url:
        raise UsageError(f"headers= needs a URL, not {server!r:.100}")

    @asynccontextmanager
    async def dial() -> AsyncGenerator[Any]:
        import mcp
        import mcp_types

        package, types = cast("Any", mcp), cast("Any", mcp_types)
        allowed = types.ListRootsResult(roots=[types.Root(uri=_address(root)) for root in roots])

        async def list_roots(context: Any) -> Any:
            return allowed

        async with AsyncExitStack() as stack:
            target = server
            if is_command:
                from mcp.client.stdio import stdio_client

                command, *words = map(str, server)
                options = {"env": dict(env or {}), "cwd": cwd}
                parameters = package.StdioServerParameters(command=command, args=words, **options)
                target = stdio_client(parameters, errlog=cast("Any", log))
            elif headers:
                import httpx2
                from mcp.client.streamable_http import streamable_http_client

                # The times are those of the client that MCP's package makes when it gets none.
                limits = httpx2.Timeout(30.0, read=300.0)
                http = httpx2.AsyncClient(headers=dict(headers), timeout=limits)
                target = streamable_http_client(server, http_client=await stack.enter_async_context(http))
            told = {"list_roots_callback": list_roots} if roots else {}
            yield await stack.enter_async_context(package.Client(target, **told))

    return dial


def _address(root: str | Path) -> str:
    return root if isinstance(root, str) and "://" in root else Path(root).expanduser().resolve().as_uri()


class _Broken(Exception):
    """The connection broke."""


class _Link:
    """An open client, held by a task of its own.

    When a connection breaks, the client cancels the task that opened it. This must be no task of a run, and
    the client may be closed from another task than the one that asked for it.
    """

    def __init__(self, dial: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self.client: Any = None
        self.broken = False
        """True once a call has found the connection broken."""
        self._open = asyncio.Event()
        self._leave = asyncio.Event()
        self._task = asyncio.create_task(self._hold(dial))

    async def _hold(self, dial: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        async with dial() as self.client:
            self._open.set()
            await self._leave.wait()

    async def opened(self) -> None:
        """Wait until the client is open; raise what prevented it."""
        waiting = asyncio.create_task(self._open.wait())
        try:
            await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._task.done():
            raise _first(self._task.exception()) or _Broken("the connection closed")

    async def ask(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Await an answer of the client.

        Raises:
            _Broken: The connection broke before it came.
            ToolError: The server refused what it was asked.
        """
        asking = asyncio.ensure_future(call(self.client))
        try:
            await asyncio.wait({asking, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise _Broken(str(_first(self._task.exception()) or _Broken("it was closed")))
            return asking.result()
        except Exception as error:
            meaning = _meaning(error)
            if meaning is None:
                raise
            raise meaning from error
        finally:
            asking.cancel()

    async def close(self) -> None:
        """Close the client; what a broken one raises then is known already."""
        self._leave.set()
        if not self._open.is_set():
            self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()


class Connection:
    """A connection that is made again when it breaks, once for each call."""

    def __init__(
        self,
        dial: Callable[[], AbstractAsyncContextManager[Any]],
        log: IO[bytes],
        timeout_s: float | None,
        *,
        attempts: int,
    ) -> None:
        self._dial = dial
        self._log = log
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._link: _Link | None = None
        self._closed = False
        self._lock = asyncio.Lock()

    async def ask(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Await an answer of the server.

        Raises:
            ServerUnavailable: The connection broke, and again after it was made once more.
            ToolError: The server refused what it was asked.
        """
        told = ""
        for _ in range(self._attempts):
            link = await self.linked()
            try:
                return await link.ask(call)
            except _Broken as error:
                link.broken, told = True, str(error)
        raise ServerUnavailable(f"the MCP server broke off: {told}{self._last_words()}")

    async def close(self) -> None:
        """Close the connection for good, and end the program that serves it."""
        self._closed = True
        await self._hang_up()

    async def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def linked(self) -> _Link:
        """Return an open client, which is made if there is none or if the last one broke.

        Raises:
            ServerUnavailable: The server cannot be reached, or this connection was closed.
            UsageError: The server's program does not exist.
        """
        async with self._lock:
            if self._closed:
                raise ServerUnavailable("the connection to the MCP server was closed")
            if self._link is not None and self._link.broken and self._attempts > 1:
                await self._hang_up()
            if self._link is None:
                self._link = await self._opened()
            return self._link

    async def _opened(self) -> _Link:
        link = _Link(self._dial)
        try:
            async with asyncio.timeout(self._timeout_s):
                await link.opened()
        except BaseException as error:
            await link.close()
            if isinstance(error, TimeoutError):
                late = f"the MCP server did not answer within {self._timeout_s:g} s{self._last_words()}"
                raise ServerUnavailable(late) from None
            if not isinstance(error, Exception):
                raise
            # A program that does not exist, one that speaks no MCP, or a server that is down.
            wrong = isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError)
            told = f"{type(error).__name__}: {error}{self._last_words()}"
            raise (UsageError if wrong else ServerUnavailable)(
                f"the MCP server cannot be reached: {told}",
                remedy="start its command by hand, or open its address, and see what it says",
            ) from error
        return link

    def _last_words(self) -> str:
        """Return the end of what the server's program wrote to stderr, for errors."""
        size = os.fstat(self._log.fileno()).st_size
        # Without moving the file's position, which the program shares.
        text = os.pread(self._log.fileno(), 2000, max(0, size - 2000)).decode(errors="replace")
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        return f" (its last words: {' | '.join(lines[-3:])[-500:]})" if lines else ""


def _first(error: BaseException | None) -> BaseException | None:
    """Return the first exception of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


def _meaning(error: BaseException) -> Exception | None:
    """Return what an exception of the client says of the connection; None if it says nothing of it."""
    import anyio
    import mcp

    told = str(error) or type(error).__name__
    if isinstance(error, cast("Any", mcp).MCPError):
        broken = cast("Any", error).code in _BROKEN_CODES or told in _BROKEN_WORDS
        return _Broken(told) if broken else ToolError(told)
    gone = (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream, OSError)
    return _Broken(told) if isinstance(error, gone) else None
