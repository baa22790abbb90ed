"""Broken HTTP, JSON and WebSocket frames, and slow clients, against every server of ours.

Each request is a valid one with random damage, token included, so that the damage gets past the guard as well.
No answer may be a 5xx, nothing may be logged as an error, and the server must then work as before.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import pytest

from agentenv.core.serving import listening
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.tools import tool
from agentenv_e2b import serve as serve_e2b
from agentenv_openenv.server import serve
from helpers.live_viewer import live
from helpers.sample_runs import varied, write_run
from helpers.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

REQUESTS = 1_500
"""Damaged requests for each server."""
AT_ONCE = 24
ANSWER_S = 2.0
"""Time that a client waits for an answer; a damaged request may rightly get none."""
TOKEN = "a-token-for-the-fuzz-run"


class Adder(ToolEnv):
    """Adds two numbers."""

    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def reward(self, answer: str) -> float:
        return float(answer == str(self.want))


ADDER = EnvSpec.of(
    "fuzz/Adder-v0", Adder, tasks=[{"id": f"t{n}", "x": n, "y": 2} for n in range(5)], max_turns=3
)


class Target(NamedTuple):
    """A server with requests that it answers, and a check that it still works."""

    address: tuple[str, int]
    requests: list[bytes]
    works: Callable[[], object]


def http(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """Return a valid request."""
    given = {"Host": "127.0.0.1", "Authorization": f"Bearer {TOKEN}", **headers}
    if body:
        given = {"Content-Type": "application/json", "Content-Length": str(len(body)), **given}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


PIECES = [
    b"\0", b"\r\n", b"\r\n\r\n", b"\xff\xfe", b"[" * 500, b"{" * 500, b'"\\ud800"', b"NaN", b"1e999", b"-1", b"9" * 400,
    b"null", b"[]", b"{}", b'""', b"Transfer-Encoding: chunked\r\n", b"Content-Encoding: gzip\r\n", b"Content-Length: 9\r\n",
    b"Content-Length: -1\r\n", b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\n", b"Host: x\r\n", b"%00", b"../" * 9,
    b"Content-Type: multipart/form-data\r\n", b"Content-Type: text/plain; charset=x\r\n", "é漢".encode(), b"X: " + b"y" * 9_000,
]  # fmt: skip


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return a request with one to four random changes."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(changed) + 1)
        end = min(len(changed), start + draw.choice((0, 1, 1, 4, 40)))
        kind = draw.randrange(5)
        if kind == 0:
            changed[start:end] = draw.choice(PIECES)
        elif kind == 1:
            changed[start:end] = draw.randbytes(end - start)
        elif kind == 2:
            del changed[start:end]
        elif kind == 3:
            changed[start:start] = changed[start:end] * draw.randint(1, 50)
        else:
            # A whole header, in the place of a line's end.
            breaks = [place for place in range(len(changed)) if changed[place : place + 2] == b"\r\n"]
            place = draw.choice(breaks) + 2 if breaks else 0
            changed[place:place] = draw.choice(PIECES)
    return bytes(changed)


async def answered(address: tuple[str, int], data: bytes) -> bytes:
    """Send bytes and return the beginning of what comes back."""
    reader, writer = await asyncio.open_connection(*address)
    got = b""
    try:
        writer.write(data)
        async with asyncio.timeout(ANSWER_S):
            got = await reader.read(65536)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return got


def statuses(answer: bytes) -> list[int]:
    """Return the status of an answer; an empty list if there is none."""
    return [int(answer.split()[1])] if answer.startswith(b"HTTP/") else []


async def fuzz(target: Target, seed: int) -> list[int]:
    """Send damaged requests and return the statuses of the answers."""
    draw = random.Random(seed)
    room = asyncio.Semaphore(AT_ONCE)

    async def one(data: bytes) -> list[int]:
        async with room:
            return statuses(await answered(target.address, data))

    sent = [damaged(draw.choice(target.requests), draw) for _ in range(REQUESTS)]
    return [status for found in await asyncio.gather(*map(one, sent)) for status in found]


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 0)


@asynccontextmanager
async def openenv(**options: object) -> AsyncIterator[tuple[Target, aiohttp.ClientSession]]:
    call = {"name": "add", "arguments": {"a": 1, "b": 2}}
    rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    requests = [
        http("GET", "/health"),
        http("GET", "/state"),
        http("GET", "/schema"),
        http("POST", "/reset", as_json({"seed": 3, "task_id": "t3", "episode_id": "e", "split": None})),
        http("POST", "/reset", as_json({"task": {"x": 1, "y": 2}})),
        http("POST", "/step", as_json({"action": {"type": "call_tool", "tool_name": "add", "arguments": {"a": 1, "b": 2}}})),
        http("POST", "/step", as_json({"action": {"content": "3", "tool_calls": []}})),
        http("POST", "/mcp", as_json(rpc)),
        http("POST", "/mcp", as_json({**rpc, "method": "openenv/session/create", "params": {}})),
        HANDSHAKE,
    ]  # fmt: skip
    async with (
        serve(ADDER, token=TOKEN, **{"max_sessions": 8, **options}) as server,
        aiohttp.ClientSession(server.url, headers=server.headers) as client,
    ):

        async def works() -> bool:
            async with client.ws_connect("/ws") as socket:
                await socket.send_json({"type": "reset", "data": {"task_id": "t3"}})
                await socket.receive_json(timeout=60)
                await socket.send_json({"type": "step", "data": {"content": "5"}})
                return (await socket.receive_json(timeout=60))["data"]["reward"] == 1.0

        yield Target(address_of(server.url), requests, works), client


@pytest.fixture(autouse=True)
def impatient(monkeypatch, caplog):
    """Give clients half a second for a body, and collect what is logged."""
    monkeypatch.setattr(listening, "BODY_TIMEOUT_S", 0.5)
    caplog.set_level(logging.WARNING)


def errors_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


HANDSHAKE = http(
    "GET",
    "/ws",
    Connection="Upgrade",
    Upgrade="websocket",
    **{"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": base64.b64encode(b"0" * 16).decode()},
)


@pytest.mark.parametrize("seed", range(3))
async def test_broken_http_to_a_served_environment(seed, caplog):
    async with openenv() as (target, _):
        told = await fuzz(target, seed)
        assert await target.works()

    assert len(told) > REQUESTS / 2
    assert [status for status in told if status >= 500] == []
    assert {400, 401, 403, 404, 408, 415, 422} <= {*told}
    assert errors_in(caplog) == []


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # aiohttp's, about damaged forms
@pytest.mark.parametrize("seed", range(2))
async def test_broken_http_to_a_served_sandbox(seed, caplog):
    form = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="/home/user/a"\r\n\r\nx\r\n--b--\r\n'
    )
    async with (
        serve_e2b(backend="none", size=1, token=TOKEN, max_sandboxes=8) as server,
        aiohttp.ClientSession(server.url, headers=server.headers) as client,
    ):
        box = (await (await client.post("/sandboxes", json={"timeout": 3600})).json())["sandboxID"]
        of_box = {"E2b-Sandbox-Id": box}
        process = as_json({"process": {"cmd": "", "args": [], "envs": {}}})
        requests = [
            http("POST", "/sandboxes", as_json({"timeout": 0, "templateID": "x", "metadata": {}})),
            http("POST", f"/sandboxes/{box}/timeout", as_json({"timeout": 3600})),
            http("GET", "/contexts", **of_box),
            http("POST", "/contexts", as_json({"cwd": "/home/user"}), **of_box),
            http(
                "POST", "/execute", as_json({"code": 1, "env_vars": {"A": "b"}, "context_id": None}), **of_box
            ),
            http("GET", "/files?path=/home/user/a", **of_box),
            http(
                "POST", "/files?path=a", form, **{**of_box, "Content-Type": "multipart/form-data; boundary=b"}
            ),
            http("POST", "/files?path=a", b"abc", **{**of_box, "Content-Type": "application/octet-stream"}),
            http(
                "POST",
                "/process.Process/Start",
                b"\0" + len(process).to_bytes(4, "big") + process,
                **{**of_box, "Content-Type": "application/connect+json"},
            ),
        ]
        told = await fuzz(Target(address_of(server.url), requests, bool), seed)
        works = await client.post(
            "/files?path=a", data=b"x", headers={**of_box, "Content-Type": "application/octet-stream"}
        )
        assert works.status == 200

    assert len(told) > REQUESTS / 2
    assert [status for status in told if status >= 500] == []
    assert {400, 404, 408, 415, 422} <= {*told}
    assert errors_in(caplog) == []


async def test_broken_http_to_the_live_viewer(tmp_path, caplog, capsys):
    write_run(tmp_path, "one", varied(2))
    with live(tmp_path) as server:
        token = server.guard.token
        paths = ["/", "/episode?run=one&place=1&", "/episode?place=0&run=&", "/open?code=x&", "/etc&"]
        requests = [http("GET", f"{path}{'' if '?' in path else '?'}token={token}") for path in paths]
        address = address_of(server.address)
        told = await fuzz(Target(address, requests, bool), 0)
        works = statuses(await answered(address, requests[0]))

    assert works == [200]
    assert len(told) > REQUESTS / 4  # what waits for the rest of a request is closed without an answer
    assert [status for status in told if status >= 500] == []
    assert {200, 400, 401, 403, 404} <= {*told}
    assert errors_in(caplog) == []
    assert "Traceback" not in capsys.readouterr().err


def frame(opcode: int, payload: bytes, *, first: int = 0x80, masked: bool = True) -> bytes:
    """Return a WebSocket frame."""
    length = len(payload)
    size = struct.pack("!B", length) if length < 126 else struct.pack("!BH", 126, length)
    size = size if length < 65536 else struct.pack("!BQ", 127, length)
    head = bytes([first | opcode, size[0] | (0x80 if masked else 0)]) + size[1:]
    return head + (b"\0\0\0\0" if masked else b"") + payload  # a mask of zeros changes nothing


RESET = as_json({"type": "reset", "data": {"task_id": "t1"}})
STEP = as_json(
    {"type": "step", "data": {"type": "call_tool", "tool_name": "add", "arguments": {"a": 1, "b": 2}}}
)
FRAMES = [
    [frame(1, RESET), frame(1, STEP)],
    [frame(1, RESET[:20], first=0), frame(0, RESET[20:])],
    [frame(9, b"ping"), frame(1, as_json({"type": "state"}))],
    [frame(1, b"\xff\xfe")],
    [frame(2, b"\0" * 100)],
    [frame(0, b"a continuation of nothing")],
    [frame(1, RESET, masked=False)],
    [frame(1, RESET, first=0xF0)],
    [frame(3, b"a reserved opcode")],
    [frame(9, b"p" * 200)],
    [b"\x81\xff" + b"\x7f" + b"\xff" * 7 + b"\0\0\0\0" + b"x" * 100],
    [frame(1, b"[" * 60_000), frame(1, RESET)],
    [frame(1, as_json({"type": "step", "data": {"content": 1}})), frame(1, as_json({"type": 3}))],
    [frame(8, b"\x03"), frame(1, RESET)],
]


@pytest.mark.parametrize("seed", range(2))
async def test_broken_frames_end_their_own_socket_and_free_its_session(seed, caplog):
    draw = random.Random(seed)
    async with openenv(idle_s=1.0) as (target, client):
        room = asyncio.Semaphore(6)  # of the eight sessions

        async def one(data: bytes) -> bytes:
            async with room:
                return await answered(target.address, HANDSHAKE + data)

        sent = [b"".join(draw.choice(FRAMES)) for _ in range(300)]
        sent = [data if draw.random() < 0.3 else damaged(data, draw) for data in sent]
        told = await asyncio.gather(*map(one, sent))
        await asyncio.wait_for(all_sessions_are_free(client), PATIENCE_S)
        assert await target.works()

    assert {status for answer in told for status in statuses(answer)} == {101}
    assert errors_in(caplog) == []


async def all_sessions_are_free(client: aiohttp.ClientSession) -> None:
    """Open as many sockets as there are sessions, as soon as none is refused."""
    while True:
        async with AsyncExitStack() as stack:
            sockets = [await stack.enter_async_context(client.ws_connect("/ws")) for _ in range(8)]
            for socket in sockets:
                await socket.send_json({"type": "state"})
            if {(await socket.receive_json())["type"] for socket in sockets} == {"state"}:
                return


async def test_slow_clients_are_cut_off_and_others_are_answered_meanwhile(caplog):
    half = http("POST", "/reset", as_json({"seed": 3, "task_id": "t3"}))
    beginnings = [
        b"",
        half[:20],
        half[: half.index(b"\r\n\r\n")],
        half[:-4],
        HANDSHAKE,
        HANDSHAKE + frame(1, RESET)[:9],
    ]
    async with openenv(idle_s=0.5, max_sessions=64) as (target, _):
        connections = [await asyncio.open_connection(*target.address) for _ in range(10) for _ in beginnings]
        for (_, writer), data in zip(connections, beginnings * 10, strict=True):
            writer.write(data)
        assert await target.works()
        async with asyncio.timeout(PATIENCE_S):
            told = [await reader.read() for reader, _ in connections]
        for _, writer in connections:
            writer.close()
        assert await target.works()

    assert {status for answer in told for status in statuses(answer)} <= {101, 408}
    assert errors_in(caplog) == []
