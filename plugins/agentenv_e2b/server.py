r"""Serve E2B's protocol from the local sandbox, so that E2B's own SDK runs code on this machine.

    E2B_API_KEY=e2b_... \
    E2B_API_URL=http://127.0.0.1:8900 E2B_SANDBOX_URL=http://127.0.0.1:8900 E2B_HTTP_VERSION=1.1

The server supports creating and killing sandboxes, running code in contexts, running commands, and reading
and writing files. Each context has its own directory, which also receives the files that the client sends.

The API key is the server's token. Requests to a sandbox carry the sandbox's own access token, as the SDK does
by itself. A sandbox ends when the time is over that the client asked for, as it does at E2B.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import BodyPartReader, web

from agentenv.core import SandboxError, UsageError
from agentenv.core.serving import (
    Guard,
    Refused,
    Served,
    guarded,
    listen,
    read_body,
    read_object,
    time_for_body,
)
from agentenv.sandbox import Sandbox, SandboxLimits, clean_code, clean_path, create
from agentenv_e2b.answers import error_messages, frame, line, messages, process_events
from agentenv_e2b.box import HOME, MAX_FILE_BYTES, MAX_FILES, Box
from agentenv_e2b.requests import context_of, environment_of, lifetime_of, process_of

__all__ = ["E2BServer", "new_key", "serve", "serve_forever"]

_MAX_EXECUTION_S = 3600.0
_BODY_TYPES = {
    "/files": ("multipart/form-data", "application/octet-stream"),
    "/process.Process/Start": ("application/connect+json",),
}
"""Content types of the requests whose body is not JSON. A page of another origin may send the first of them,
so these depend on the guard's other rules."""


def new_key() -> str:
    """Return a new API key of the form that E2B's SDK accepts."""
    return f"e2b_{secrets.token_hex(20)}"


class E2BServer:
    """The web application that serves the protocol from a started sandbox.

    Args:
        pool: the started sandbox, which lends one to each client.
        guard: rules for whom the server answers; its token is the API key. None makes a new key.
        max_sandboxes: limit of sandboxes that exist at once.
    """

    def __init__(self, pool: Sandbox, *, guard: Guard | None = None, max_sandboxes: int = 64) -> None:
        self.guard = guard or Guard(token=new_key())
        self._pool = pool
        self._max_sandboxes = max_sandboxes
        self._boxes: dict[str, Box] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        check = guarded(
            self.guard,
            types=lambda request: _BODY_TYPES.get(request.path, ("application/json",)),
            tokens=self._tokens,
        )
        app = web.Application(client_max_size=MAX_FILE_BYTES, middlewares=[check])
        app.add_routes(
            [
                web.post("/sandboxes", self._create),
                web.post("/v2/sandboxes", self._create),
                web.delete("/sandboxes/{id}", self._kill),
                web.post("/sandboxes/{id}/timeout", self._extend),
                web.get("/health", self._ok),
                web.post("/execute", self._execute),
                web.get("/contexts", self._contexts),
                web.post("/contexts", self._new_context),
                web.delete("/contexts/{id}", self._remove_context),
                web.post("/contexts/{id}/restart", self._remove_context),
                web.get("/files", self._read),
                web.post("/files", self._write),
                web.post("/process.Process/Start", self._start),
            ]
        )
        app.on_cleanup.append(self._clean)
        return app

    def _tokens(self, request: web.Request) -> Sequence[str]:
        """Return the access token of the sandbox that a request names."""
        if "E2b-Sandbox-Id" not in request.headers or "/sandboxes" in request.path:
            return []
        return [self._box(request).token]

    async def _clean(self, app: web.Application) -> None:
        for name in list(self._boxes):
            await self._end(name)
        await asyncio.gather(*self._ending)

    async def _end(self, name: str) -> None:
        box = self._boxes.pop(name, None)
        if box is not None:
            await box.close()

    def _end_later(self, name: str, seconds: float) -> None:
        """End a sandbox after this time, in place of the time that was set before."""

        def end() -> None:
            task = asyncio.ensure_future(self._end(name))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

        self._boxes[name].end_with(asyncio.get_running_loop().call_later(seconds, end))

    def _box(self, request: web.Request) -> Box:
        name = request.headers.get("E2b-Sandbox-Id", "")
        if name not in self._boxes:
            raise Refused(404, f"sandbox {name!r:.80} not found")
        return self._boxes[name]

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response(status=204)

    async def _create(self, request: web.Request) -> web.Response:
        asked = await read_object(request)
        seconds = lifetime_of(asked)
        if len(self._boxes) >= self._max_sandboxes:
            raise Refused(
                429, f"all {self._max_sandboxes} sandboxes are in use", remedy="kill one that is not needed"
            )
        name = "i" + secrets.token_hex(10)
        stack = AsyncExitStack()
        box = self._boxes[name] = Box(stack)  # before anything is awaited, so that it counts
        try:
            box.sandbox = await stack.enter_async_context(self._pool.lease())
        except BaseException:
            del self._boxes[name]
            raise
        self._end_later(name, seconds)
        answer = {
            "sandboxID": name,
            "templateID": str(asked.get("templateID", "code-interpreter-v1")),
            "clientID": "local",
            "envdVersion": "0.5.0",
            "envdAccessToken": box.token,
            "trafficAccessToken": box.token,
            "domain": None,
            "alias": "code-interpreter-v1",
        }
        return web.json_response(answer, status=201)

    async def _extend(self, request: web.Request) -> web.Response:
        name, seconds = request.match_info["id"], lifetime_of(await read_object(request))
        if name not in self._boxes:
            raise Refused(404, f"sandbox {name!r:.80} not found")
        self._end_later(name, seconds)
        return web.Response(status=204)

    async def _kill(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name not in self._boxes:
            raise Refused(404, f"sandbox {name!r:.80} not found")
        await self._end(name)
        return web.Response(status=204)

    async def _contexts(self, request: web.Request) -> web.Response:
        return web.json_response([_context(name) for name in self._box(request).contexts])

    async def _new_context(self, request: web.Request) -> web.Response:
        box, name = self._box(request), secrets.token_hex(8)
        await box.context(name)
        return web.json_response(_context(name), status=201)

    async def _remove_context(self, request: web.Request) -> web.Response:
        box, name = self._box(request), request.match_info["id"]
        session = box.contexts.pop(name, None)
        if box.last == name:  # or the next command would make it again
            box.last = "default"
        if session is not None:
            await session.close()
        return web.Response(status=204)

    async def _execute(self, request: web.Request) -> web.StreamResponse:
        """Run code and answer with lines of JSON."""
        box, asked = self._box(request), await read_object(request)
        code, env = clean_code(asked.get("code")), environment_of(asked.get("env_vars"))
        session = await box.context(context_of(asked))
        box.count += 1
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        with contextlib.suppress(ConnectionError):  # a client that ran out of time has gone
            await response.prepare(request)
            await response.write(line({"type": "number_of_executions", "execution_count": box.count}))
            mark = secrets.token_hex(16)
            hook = f"lambda value: value is None or print({mark!r}, repr(value), {mark!r}, sep='')"
            try:
                if env:
                    await session.run_code(f"import os; os.environ.update({env!r})")
                await session.run_code(f"import sys; sys.displayhook = {hook}")
                result = await session.run_code(code, timeout_s=_MAX_EXECUTION_S, echo=True)
                told = messages(result, mark)
            except (SandboxError, UsageError) as error:  # the status of the answer is sent already
                told = error_messages(error)
            for message in told:
                await response.write(line(message))
            await response.write_eof()
        return response

    async def _read(self, request: web.Request) -> web.Response:
        box, path = self._box(request), clean_path(_path(request))
        for session in [box.contexts.get(box.last), *box.contexts.values()]:
            if session is not None and session.alive:
                with contextlib.suppress(FileNotFoundError):
                    return web.Response(body=await session.read_file(path))
        if path in box.files:
            return web.Response(body=box.files[path])
        raise Refused(404, f"file {path!r:.200} not found")

    async def _write(self, request: web.Request) -> web.Response:
        box = self._box(request)
        if request.content_type.startswith("multipart/"):
            parts = await _parts(request)
        else:
            parts = [("", await read_body(request))]
        named = _path(request) if "path" in request.query else None
        files = [(clean_path(named or name.removeprefix(HOME)), data) for name, data in parts]
        for path, data in files:
            await box.write(path, data)
        return web.json_response(
            [{"name": path.rpartition("/")[2], "type": "file", "path": HOME + path} for path, _ in files]
        )

    async def _start(self, request: web.Request) -> web.StreamResponse:
        """Run a command and answer with the frames of a Connect stream."""
        box, (command, env) = self._box(request), process_of(await read_body(request))
        session = await box.context(box.last)
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            await response.write(frame({"event": {"start": {"pid": 1}}}))
            try:
                result = await session.exec(command, timeout_s=_MAX_EXECUTION_S, env=env)
                await box.forget_removed(session)
                for event in process_events(result):
                    await response.write(frame(event))
                end: dict[str, Any] = {}
            except (SandboxError, UsageError) as error:
                end = {"error": {"code": "unavailable", "message": str(error)}}
            await response.write(frame(end, last=True))
            await response.write_eof()
        return response


def _context(name: str) -> dict[str, str]:
    return {"id": name, "language": "python", "cwd": HOME}


def _path(request: web.Request) -> str:
    return request.query.get("path", "").removeprefix(HOME)


async def _parts(request: web.Request) -> list[tuple[str, bytes]]:
    """Return the file names and contents of a form."""
    parts: list[tuple[str, bytes]] = []
    room = MAX_FILE_BYTES
    async with time_for_body():
        try:
            async for part in await request.multipart():
                if not isinstance(part, BodyPartReader) or len(parts) == MAX_FILES:
                    raise UsageError(f"the form has a form inside, or more than {MAX_FILES} files")
                data = bytearray()
                while chunk := await part.read_chunk():
                    if (room := room - len(chunk)) < 0:
                        raise Refused(413, f"the files have more than {MAX_FILE_BYTES:,} bytes")
                    data += chunk
                parts.append((part.filename or "", bytes(data)))
        except (ValueError, AssertionError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"the form cannot be read: {error}") from error
    return parts


@asynccontextmanager
async def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    size: int = 4,
    backend: str = "auto",
    limits: SandboxLimits | None = None,
    max_sandboxes: int = 64,
    token: str | None = None,
    allowed_hosts: Sequence[str] = (),
) -> AsyncGenerator[Served]:
    """Serve the protocol while the context is open; yields the server's address and its API key.

    Args:
        host: address on which the server listens.
        port: port on which the server listens; 0 chooses a free one.
        size: number of sandboxes that run code at once.
        backend: backend of the sandbox.
        limits: limits of one execution.
        max_sandboxes: limit of sandboxes that exist at once.
        token: API key that clients send; None makes a new one, and an empty one lets everyone act who reaches
            the server.
        allowed_hosts: further host names by which clients may reach the server.

    Raises:
        UsageError: Other machines could act without a key.
        SandboxUnavailable: This machine offers no isolation.
    """
    guard = Guard.of(host, new_key() if token is None else token, allowed_hosts)
    async with create(backend, size=size, limits=limits) as pool:
        server = E2BServer(pool, guard=guard, max_sandboxes=max_sandboxes)
        async with listen(server.app(), guard, port=port) as served:
            yield served


async def serve_forever(*, said: Callable[[str], None], **options: Any) -> None:
    """Serve until the task is cancelled; the command line calls this.

    Args:
        said: called with the text for the person who started the server.
        options: options of `serve`.

    Raises:
        SandboxError: The sandbox cannot start, or the port is in use.
    """
    try:
        async with serve(**options) as served:
            said(f"serving e2b's protocol at {served.url}")
            said(served.how_to_send("E2B_API_KEY"))
            await asyncio.Event().wait()
    except OSError as error:
        raise SandboxError(f"the server cannot listen: {error}") from error
