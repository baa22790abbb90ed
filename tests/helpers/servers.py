"""Small HTTP servers on this machine: of one handler, or of answers that are given one after the other."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@asynccontextmanager
async def http_server(handler: Any) -> AsyncGenerator[str]:
    """Serve an application, or every path with one handler; yield the address."""
    app = handler
    if not isinstance(app, web.Application):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def streamed(request: web.Request, *blocks: bytes) -> web.StreamResponse:
    """Answer with the blocks of a stream of events; the text `close` breaks the connection."""
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    for block in blocks:
        if block == b"close":
            assert request.transport is not None
            request.transport.close()
            return reply
        await reply.write(block)
    await reply.write_eof()
    return reply


def events(*said: object) -> list[bytes]:
    """Return the blocks of a stream: JSON, unless what is said is a text."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in said]
    return [text.encode() if text == "close" else f"data: {text}\n\n".encode() for text in texts]


@dataclass
class Planned:
    """What a server was asked."""

    url: str = ""
    requests: list[web.Request] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)


@asynccontextmanager
async def planned(*plan: Any, then: Callable[[Any], Any] | None = None) -> AsyncGenerator[Planned]:
    """Serve answers in their order: a dict is JSON, a list a stream, and "close" breaks the connection.

    Args:
        plan: the answers; a function makes a response anew.
        then: returns the answer to a body after those.
    """
    api, left = Planned(), list(plan)

    async def answer(request: web.Request) -> web.StreamResponse:
        api.requests.append(request)
        api.bodies.append(json.loads(await request.text() or "null"))
        said = left.pop(0) if left or then is None else then(api.bodies[-1])
        if said == "close":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if isinstance(said, list):
            return await streamed(request, *events(*said))
        if isinstance(said, dict):
            return web.json_response(said)
        return said if isinstance(said, web.StreamResponse) else said()

    async with http_server(answer) as api.url:
        yield api
