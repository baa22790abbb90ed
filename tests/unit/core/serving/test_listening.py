"""Bodies of requests: what was sent compressed is inflated beside the event loop, and not without bound."""

from __future__ import annotations

import gzip
import zlib

import aiohttp
import pytest
from aiohttp import web

from agentenv.core.serving import Guard, guarded, listen, read_object
from agentenv.core.serving.listening import MAX_INFLATED

BODY = b'{"a": 1}'


def raw(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        ("identity", BODY, 200),
        ("gzip", gzip.compress(BODY, mtime=0), 200),
        ("deflate", zlib.compress(BODY), 200),
        ("deflate", raw(BODY), 200),
        ("gzip", gzip.compress(b'{"a": "' + b"x" * MAX_INFLATED + b'"}', mtime=0), 413),
        ("gzip", gzip.compress(b'{"a": "' + b"x" * 3_000_000 + b'"}', mtime=0), 413),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], 422),
        ("gzip", gzip.compress(b"", mtime=0) * 1_000 + gzip.compress(BODY, mtime=0), 422),
        ("gzip", BODY, 422),
        ("gzip", b"", 422),
        ("br", BODY, 415),
    ],
)
async def test_a_body_is_inflated_as_far_as_is_allowed(coding: str, body: bytes, status: int):
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(await read_object(request))

    guard = Guard(host="127.0.0.1", token="a-token-of-this-test")
    app = web.Application(client_max_size=64 << 20, middlewares=[guarded(guard)])
    app.router.add_post("/", answer)
    async with listen(app, guard) as served, aiohttp.ClientSession(headers=served.headers) as client:
        sent = {"Content-Type": "application/json", "Content-Encoding": coding}
        async with client.post(served.url, data=body, headers=sent) as answered:
            assert answered.status == status
            assert status != 200 or await answered.json() == {"a": 1}
