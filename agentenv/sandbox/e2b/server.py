r"""Serve E2B's protocol from the local sandbox, so that E2B's own SDK runs code on this machine.

    E2B_API_KEY=e2b_0000000000000000000000000000000000000000 \
    E2B_API_URL=http://127.0.0.1:8900 E2B_SANDBOX_URL=http://127.0.0.1:8900 E2B_HTTP_VERSION=1.1

What is served: creating and killing sandboxes, running code in contexts, commands, reading and
writing files. A context has a directory of its own, into which files sent by the client go too.
There is no authentication: listen on loopback only.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import BodyPartReader, web

from agentenv.core.errors import SandboxError, UsageError
from agentenv.sandbox.base import ExecResult, Sandbox, SandboxLimits, Session, create

__all__ = ["E2BServer", "serve", "serve_forever"]

_log = logging.getLogger(__name__)
_HOME = "/home/user/"
_MAX_EXECUTION_S = 3600.0


@dataclass(slots=True)
class _Box:
    """One sandbox as the client sees it."""

    sandbox: Sandbox
    stack: AsyncExitStack
    contexts: dict[str, Session] = field(default_factory=dict[str, Session])
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    last: str = "default"
    count: int = 0

    async def context(self, name: str | None) -> Session:
        """Return a context's session; the default one is made when first used."""
        self.last = name or "default"
        session = self.contexts.get(self.last)
        if session is None or session.ended:
            session = self.contexts[self.last] = self.sandbox.session()
            for path, data in self.files.items():
                await session.write_file(path, data)
        return session


class E2BServer:
    """The protocol over a sandbox that is already running."""

    def __init__(self, pool: Sandbox) -> None:
        self._pool = pool
        self._boxes: dict[str, _Box] = {}

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.post("/sandboxes", self._create),
                web.post("/v2/sandboxes", self._create),
                web.delete("/sandboxes/{id}", self._kill),
                web.post("/sandboxes/{id}/timeout", self._ok),
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

    async def _clean(self, app: web.Application) -> None:
        for box in list(self._boxes.values()):
            await box.stack.aclose()
        self._boxes.clear()

    def _box(self, request: web.Request) -> _Box:
        name = request.headers.get("E2b-Sandbox-Id", "")
        if name not in self._boxes:
            raise web.HTTPNotFound(
                text=json.dumps({"code": 404, "message": f"sandbox {name} not found"}),
                content_type="application/json",
            )
        return self._boxes[name]

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response(status=204)

    async def _create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        stack = AsyncExitStack()
        box = _Box(await stack.enter_async_context(self._pool.lease()), stack)
        name = "i" + secrets.token_hex(10)
        self._boxes[name] = box
        answer = {
            "sandboxID": name,
            "templateID": asked.get("templateID", "code-interpreter-v1"),
            "clientID": "local",
            "envdVersion": "0.5.0",
            "envdAccessToken": secrets.token_hex(16),
            "domain": None,
            "alias": "code-interpreter-v1",
        }
        return web.json_response(answer, status=201)

    async def _kill(self, request: web.Request) -> web.Response:
        box = self._boxes.pop(request.match_info["id"], None)
        if box is None:
            return web.json_response({"code": 404, "message": "sandbox not found"}, status=404)
        await box.stack.aclose()
        return web.Response(status=204)

    async def _contexts(self, request: web.Request) -> web.Response:
        return web.json_response([_context(name) for name in self._box(request).contexts])

    async def _new_context(self, request: web.Request) -> web.Response:
        box, name = self._box(request), secrets.token_hex(8)
        await box.context(name)
        return web.json_response(_context(name), status=201)

    async def _remove_context(self, request: web.Request) -> web.Response:
        session = self._box(request).contexts.pop(request.match_info["id"], None)
        if session is not None:
            await session.close()
        return web.Response(status=204)

    async def _execute(self, request: web.Request) -> web.StreamResponse:
        """Run code and answer with lines of JSON."""
        box, asked = self._box(request), await request.json()
        session = await box.context(asked.get("context_id"))
        box.count += 1
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        await _line(response, {"type": "number_of_executions", "execution_count": box.count})
        if asked.get("env_vars"):
            await session.run_code(f"import os; os.environ.update({asked['env_vars']!r})")
        mark = secrets.token_hex(16)
        hook = f"lambda value: value is None or print({mark!r}, repr(value), {mark!r}, sep='')"
        await session.run_code(f"import sys; sys.displayhook = {hook}")
        result = await session.run_code(asked["code"], timeout_s=_MAX_EXECUTION_S, echo=True)
        with contextlib.suppress(ConnectionError):  # a client that ran out of time has gone
            for message in _messages(result, mark):
                await _line(response, message)
            await response.write_eof()
        return response

    async def _read(self, request: web.Request) -> web.Response:
        box, path = self._box(request), _path(request)
        for session in [box.contexts.get(box.last), *box.contexts.values()]:
            if session is not None and session.alive:
                with contextlib.suppress(FileNotFoundError):
                    return web.Response(body=await session.read_file(path))
        if path in box.files:
            return web.Response(body=box.files[path])
        return web.json_response({"code": 404, "message": f"file {path} not found"}, status=404)

    async def _write(self, request: web.Request) -> web.Response:
        box = self._box(request)
        written: list[dict[str, str]] = []
        if request.content_type.startswith("multipart/"):
            parts: list[tuple[str, bytes | bytearray]] = [
                (part.filename or "", await part.read(decode=False))
                async for part in await request.multipart()
                if isinstance(part, BodyPartReader)
            ]
        else:
            parts = [("", await request.read())]
        for name, data in parts:
            path = _path(request) if "path" in request.query else name.removeprefix(_HOME)
            box.files[path] = bytes(data)
            for session in box.contexts.values():
                if session.alive:
                    await session.write_file(path, bytes(data))
            written.append({"name": path.rpartition("/")[2], "type": "file", "path": _HOME + path})
        return web.json_response(written)

    async def _start(self, request: web.Request) -> web.StreamResponse:
        """Run a command and answer with the frames of a Connect stream."""
        body = await request.read()
        process = json.loads(body[5:])["process"]
        box = self._box(request)
        session = await box.context(box.last)
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)
        await _frame(response, {"event": {"start": {"pid": 1}}})
        command = [process["cmd"], *(argument for argument in process.get("args", []) if argument != "-l")]
        result = await session.exec(command, timeout_s=_MAX_EXECUTION_S, env=process.get("envs"))
        for name, text in (("stdout", result.stdout), ("stderr", result.stderr)):
            if text:
                await _frame(response, {"event": {"data": {name: base64.b64encode(text.encode()).decode()}}})
        code = result.exit_code if result.exit_code is not None else -1
        await _frame(
            response, {"event": {"end": {"exitCode": code, "exited": True, "status": f"exit status {code}"}}}
        )
        await _frame(response, {}, last=True)
        await response.write_eof()
        return response


def _context(name: str) -> dict[str, str]:
    return {"id": name, "language": "python", "cwd": _HOME}


def _path(request: web.Request) -> str:
    return request.query.get("path", "").removeprefix(_HOME)


def _messages(result: ExecResult, mark: str) -> list[dict[str, Any]]:
    """Put a result into the messages of a code interpreter."""
    before, *rest = result.stdout.split(mark)
    values, after = rest[:1], "".join(rest[1:]).removeprefix("\n")
    messages: list[dict[str, Any]] = []
    for kind, text in (("stdout", before + after), ("stderr", result.stderr)):
        if text and not (kind == "stderr" and result.status not in ("ok",)):
            messages.append({"type": kind, "text": text, "timestamp": "0"})
    messages += [{"type": "result", "text": value, "is_main_result": True} for value in values]
    if result.status != "ok":
        last = result.stderr.rstrip().rpartition("\n")[2]
        name, _, value = last.partition(": ")
        if result.status in ("error", "memory") and name.isidentifier():
            messages.append({"type": "error", "name": name, "value": value, "traceback": result.stderr})
        else:
            code = str(result.exit_code)
            name = "SystemExit" if result.status == "error" else "ExecutionEnded"
            messages.append(
                {"type": "error", "name": name, "value": code, "traceback": result.stderr or result.note}
            )
    messages.append({"type": "end_of_execution"})
    return messages


async def _line(response: web.StreamResponse, message: dict[str, Any]) -> None:
    await response.write(json.dumps(message).encode() + b"\n")


async def _frame(response: web.StreamResponse, message: dict[str, Any], *, last: bool = False) -> None:
    body = json.dumps(message).encode()
    await response.write(bytes([2 if last else 0]) + len(body).to_bytes(4, "big") + body)


@asynccontextmanager
async def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    size: int = 4,
    backend: str = "auto",
    limits: SandboxLimits | None = None,
) -> AsyncGenerator[str]:
    """Serve the protocol; yields the address.

    Raises:
        SandboxUnavailable: This machine has no isolation.
    """
    async with create(backend, size=size, limits=limits) as pool:
        runner = web.AppRunner(E2BServer(pool).app(), shutdown_timeout=2.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            address = runner.addresses[0]
            yield f"http://{address[0]}:{address[1]}"
        finally:
            await runner.cleanup()


async def serve_forever(*, protocol: str = "e2b", **options: Any) -> None:
    """Serve until cancelled; for the command line.

    Raises:
        UsageError: The protocol is unknown.
        SandboxError: The sandbox cannot be had, or the port is taken.
    """
    if protocol != "e2b":
        raise UsageError(f"unknown sandbox protocol {protocol!r}", remedy="there is: e2b")
    try:
        async with serve(**options) as address:
            _log.warning("serving e2b's protocol at %s", address)
            await asyncio.Event().wait()
    except OSError as error:
        raise SandboxError(f"the server cannot listen: {error}") from error
