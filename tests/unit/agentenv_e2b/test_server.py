"""The server of E2B's protocol: who may use it, how much, and what it says to wrong requests."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from io import BytesIO

import aiohttp
import pytest

from agentenv.core import UsageError
from agentenv_e2b import new_key, serve
from helpers.waiting import until

PROCESS = {"Content-Type": "application/connect+json"}


@asynccontextmanager
async def served(**options):
    """Serve a sandbox, without isolation where it runs no code, and yield a client with the key."""
    async with (
        serve(**{"backend": "none", "size": 1, **options}) as server,
        aiohttp.ClientSession(server.url, headers={"X-API-Key": server.token}) as http,
    ):
        yield server, http


async def made(http) -> dict[str, str]:
    """Make a sandbox and return the headers that E2B's SDK sends to it."""
    box = await (await http.post("/sandboxes", json={"timeout": 60})).json()
    return {"E2b-Sandbox-Id": box["sandboxID"], "X-Access-Token": box["envdAccessToken"], "X-API-Key": ""}


def connect(message: object) -> bytes:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return b"\0" + len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-API-Key": ""}, 401),
        ({"X-API-Key": new_key()}, 401),
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ],
)
async def test_strangers_and_web_pages_get_no_sandbox(headers, status):
    async with served() as (_, http):
        answer = await http.post(
            "/sandboxes", data=b"{}", headers={"Content-Type": "application/json", **headers}
        )
        told = (await answer.json())["message"]

    assert (answer.status, bool(told)) == (status, True)


async def test_a_sandbox_has_a_token_of_its_own_that_opens_nothing_else():
    async with served() as (_, http):
        one, two = await made(http), await made(http)
        mixed = {**one, "X-Access-Token": two["X-Access-Token"]}
        right = await http.get("/contexts", headers=one)
        wrong = await http.get("/contexts", headers=mixed)
        more = await http.post("/sandboxes", json={}, headers=one)
        kill = await http.delete(f"/sandboxes/{two['E2b-Sandbox-Id']}", headers=one)

    assert [answer.status for answer in (right, wrong, more, kill)] == [200, 401, 401, 401]


async def test_the_number_of_sandboxes_is_limited():
    async with served(max_sandboxes=2) as (_, http):
        one = await made(http)
        await made(http)
        third = await http.post("/sandboxes", json={})
        told = (await third.json())["message"]
        await http.delete(f"/sandboxes/{one['E2b-Sandbox-Id']}")
        assert await made(http)

    assert third.status == 429
    assert "all 2 sandboxes are in use" in told


@pytest.mark.sandbox
async def test_the_number_of_contexts_is_limited():
    async with served(backend="auto") as (_, http):
        box = await made(http)
        told = [(await http.post("/contexts", json={}, headers=box)).status for _ in range(17)]

    assert told == [201] * 16 + [429]


async def test_a_sandbox_ends_when_its_time_is_over():
    async with served(max_sandboxes=1) as (_, http):
        one = await made(http)
        longer = await http.post(f"/sandboxes/{one['E2b-Sandbox-Id']}/timeout", json={"timeout": 0})

        async def gone():
            return (await http.get("/contexts", headers=one)).status == 404

        await until(gone)
        assert longer.status == 204
        assert await made(http)


WRONG = [
    ("POST", "/sandboxes", b"", 422),
    ("POST", "/sandboxes", b"[1]", 422),
    ("POST", "/sandboxes", b"{", 422),
    ("POST", "/sandboxes", b"[" * 100_000, 422),
    ("POST", "/sandboxes", b'{"timeout": "long"}', 422),
    ("POST", "/sandboxes", b'{"timeout": NaN}', 422),
    ("POST", "/sandboxes", b'{"timeout": -1}', 422),
    ("POST", "/sandboxes", b'{"timeout": 1e300}', 422),
    ("POST", "/sandboxes/none/timeout", b'{"timeout": 1}', 404),
    ("DELETE", "/sandboxes/none", b"", 404),
    ("GET", "/sandboxes", b"", 405),
    ("POST", "/execute", b"{}", 422),
    ("POST", "/execute", b'{"code": 3}', 422),
    ("POST", "/execute", b'{"code": "1", "env_vars": [1]}', 422),
    ("POST", "/execute", b'{"code": "1", "env_vars": {"A=": "x"}}', 422),
    ("POST", "/execute", b'{"code": "1", "env_vars": {"A": 1}}', 422),
    ("POST", "/execute", b'{"code": "1", "context_id": {}}', 422),
    ("POST", "/execute", b'{"code": "\\ud800"}', 422),
    ("POST", "/execute", b"\xff", 422),
    ("GET", "/files", b"", 422),
    ("GET", "/files?path=../../etc/passwd", b"", 422),
    ("GET", "/files?path=none", b"", 404),
    ("GET", "/files?path=%00", b"", 422),
    ("POST", "/files", b"no type", 415),
    ("GET", "/nothing", b"", 404),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), WRONG)
async def test_a_wrong_request_is_refused_in_words(method, path, body, status):
    async with served() as (_, http):
        headers = {} if "/sandboxes" in path else await made(http)
        sent = (
            {"data": body, "headers": {**headers, "Content-Type": "application/json"}}
            if body
            else {"headers": headers}
        )
        answer = await http.request(method, path, **sent)
        told = (await answer.json())["message"]

    assert (answer.status, bool(told)) == (status, True)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"\0\0\0\0\xff{}",
        b"\1\0\0\0\2{}",
        connect([]),
        connect({"process": 3}),
        connect({"process": {"cmd": 3}}),
        connect({"process": {"cmd": "ls", "args": "-l"}}),
        connect({"process": {"cmd": "ls", "args": [1]}}),
        connect({"process": {"cmd": "ls", "envs": {"A": 1}}}),
        connect(b"{" * 9),
    ],
)
async def test_a_wrong_command_is_refused_in_words(body):
    async with served() as (_, http):
        answer = await http.post("/process.Process/Start", data=body, headers={**await made(http), **PROCESS})

        assert (answer.status, bool((await answer.json())["message"])) == (422, True)


async def test_forms_that_are_broken_or_too_large_are_refused():
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    many = (
        b"".join(b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\nx\r\n' for _ in range(1_001))
        + b"--b--\r\n"
    )
    bodies = [b"x", b"--b\r\n\r\nhalf a part", b"--b\r\nno header\r\n\r\nx\r\n--b--", many]
    async with served() as (_, http):
        box = await made(http)
        told = [(await http.post("/files", data=body, headers={**box, **form})).status for body in bodies]
        large = await http.post(
            "/files?path=a",
            data=BytesIO(b"x" * ((64 << 20) + 1)),
            headers={**box, "Content-Type": "application/octet-stream"},
        )

    assert [status // 100 for status in told] == [4] * 4
    assert large.status == 413


async def test_other_machines_need_a_key():
    with pytest.raises(UsageError, match="it has no token"):
        async with serve(host="0.0.0.0", backend="none", token=""):
            pass
