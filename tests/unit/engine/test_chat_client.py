"""How a chat request is sent: server-sent events, headers, proxies, keys, Azure."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic

import pytest
from aiohttp import web

from agentenv.core import EngineUnavailable
from agentenv.engine import OpenAIChatEngine, Sampling, chat_client
from agentenv.engine.chat_client import ChatClient, Pace, Patience
from agentenv.engine.chat_errors import ChatFailure
from agentenv.engine.chat_reply import Unreadable
from agentenv.runs import evaluate

DEFAULTS = {"headers": {}, "retry_s": 0, "timeout_s": 30.0}
ASK = [{"role": "user", "content": "hi"}]
HELLO = {"choices": [{"index": 0, "message": {"content": "hello"}, "finish_reason": "stop"}]}
DELTA = {"choices": [{"index": 0, "delta": {"content": "hello"}, "finish_reason": "stop"}]}


@asynccontextmanager
async def server(handler):
    """Serve every path with a handler; yield the address."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


def streams(*blocks: bytes):
    """Return a handler that writes the blocks of a stream."""

    async def handle(request):
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for block in blocks:
            await stream.write(block)
        await stream.write_eof()
        return stream

    return handle


@asynccontextmanager
async def client_on(handler, **options):
    """Yield a client of a server with this handler."""
    async with server(handler) as address:
        client = ChatClient(f"{address}/v1/", "k", **DEFAULTS | options)
        try:
            yield client
        finally:
            await client.close()


SAID = json.dumps(DELTA).encode()
EVENTS = {
    "plain": [b"data: " + SAID + b"\n\ndata: [DONE]\n\n"],
    "no space, carriage returns": [b"data:" + SAID + b"\r\n\r\ndata:[DONE]\r\n\r\n"],
    "comments and other fields": [b": ping\n\nevent: message\nid: 4\nretry: 9\ndata: " + SAID + b"\n\n"],
    "cut anywhere": [bytes([byte]) for byte in b"data: " + SAID + b"\n\n"],
    "several lines": [b"data: " + SAID.replace(b", ", b",\ndata: ") + b"\n\n"],
    "no blank line at the end": [b"data: " + SAID],
    "one newline at the end": [b"data: " + SAID + b"\n"],
    "more after the end": [b"data: " + SAID + b"\n\ndata: [DONE]\n\ndata: nonsense\n\n"],
}


@pytest.mark.parametrize("blocks", EVENTS.values(), ids=EVENTS)
async def test_events_are_read_however_they_are_written(blocks):
    async with client_on(streams(*blocks)) as client:
        answer = await client.send({"messages": ASK}, stream=True)

    assert answer["choices"][0]["message"]["content"] == "hello"


async def test_a_long_event_is_read():
    text = "x" * 300_000
    long = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    async with client_on(streams(b"data: " + json.dumps(long).encode() + b"\n\n")) as client:
        answer = await client.send({"messages": ASK}, stream=True)

    assert answer["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(("error", "said"), [("overloaded", "overloaded"), ({"code": 1}, '{"code": 1}')])
async def test_an_error_within_a_stream_is_said(error, said):
    async with client_on(streams(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")) as client:
        with pytest.raises(ChatFailure, match=said) as caught:
            await client.send({"messages": ASK}, stream=True)

    assert (caught.value.status_code, caught.value.body, caught.value.reached) == (None, error, True)


async def test_a_request_carries_the_key_and_the_scope(monkeypatch):
    monkeypatch.setenv("OPENAI_ORG_ID", "org")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project")
    seen = []

    async def handle(request):
        seen.append((request.path, dict(request.headers), await request.text()))
        return web.json_response(HELLO)

    async with client_on(handle) as client:
        await client.send({"messages": [{"role": "user", "content": "\ud800"}]}, stream=False)

    ((path, headers, text),) = seen
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer k"
    assert (headers["OpenAI-Organization"], headers["OpenAI-Project"]) == ("org", "project")
    assert '"\\ud800"' in text


async def told(handler_address: str) -> None:
    """Post one request to an address."""
    client = ChatClient(handler_address, "k", **DEFAULTS)
    try:
        await client.send({"messages": ASK}, stream=False)
    finally:
        await client.close()


async def test_the_proxy_of_the_environment_is_used(monkeypatch):
    seen = []

    async def handle(request):
        seen.append((str(request.url), request.headers.get("Proxy-Authorization")))
        return web.json_response(HELLO)

    async with server(handle) as proxy:
        monkeypatch.setenv("http_proxy", proxy.replace("//", "//me:secret@"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        await told("http://model.example/v1")

    assert seen == [("http://model.example/v1/chat/completions", "Basic bWU6c2VjcmV0")]


async def test_an_address_that_the_environment_excepts_is_asked_directly(monkeypatch):
    seen = []

    async def handle(request):
        seen.append(request.path)
        return web.json_response(HELLO)

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    async with server(handle) as address:
        await told(f"{address}/v1")

    assert seen == ["/v1/chat/completions"]


async def test_a_password_in_netrc_does_not_take_the_place_of_the_key(monkeypatch, tmp_path):
    seen = []

    async def handle(request):
        seen.append(request.headers["Authorization"])
        return web.json_response(HELLO)

    (tmp_path / "netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    async with client_on(handle) as client:
        await client.send({"messages": ASK}, stream=False)

    assert seen == ["Bearer k"]


async def test_an_api_that_says_nothing_is_unavailable_and_asked_again(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_S", 0.0)
    asked = 0

    async def handle(request):
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.Event().wait()
        return web.json_response(HELLO)

    async with server(handle) as address:
        engine = OpenAIChatEngine("m", base_url=f"{address}/v1", api_key="k", retry_s=30, timeout_s=1)
        done = await engine.chat(ASK, [], Sampling())
        await engine.close()

    assert (done.message["content"], asked) == ("hello", 2)


async def test_without_retries_a_silent_api_timed_out():
    async def handle(request):
        await asyncio.Event().wait()

    async with server(handle) as address:
        engine = OpenAIChatEngine("m", base_url=f"{address}/v1", api_key="k", retry_s=0, timeout_s=0.05)
        with pytest.raises(EngineUnavailable, match="did not answer in time"):
            await engine.chat(ASK, [], Sampling())
        await engine.close()


@pytest.mark.parametrize(("attempt", "most"), [(0, 0.5), (1, 1.0), (4, 8.0), (5000, 8.0)])
def test_pauses_double_up_to_a_limit(attempt, most):
    pause = Patience(60).pause(monotonic(), attempt, rate=False, asked=None)

    assert 0.75 * most <= pause <= most


def test_at_a_limit_of_rate_the_time_begins_anew_with_each_answer_that_anybody_gets():
    patience, long_ago = Patience(60), monotonic() - 100

    assert patience.pause(long_ago, 0, rate=True, asked=1.0) is None
    patience.answered()
    assert 1.0 <= patience.pause(long_ago, 0, rate=True, asked=1.0) <= 1.5
    assert patience.pause(long_ago, 0, rate=False, asked=1.0) is None


async def test_a_pace_spaces_requests_evenly_and_no_limit_waits_for_nothing(monkeypatch):
    waited = []

    async def sleep(seconds):
        waited.append(round(seconds, 1))

    monkeypatch.setattr(chat_client.asyncio, "sleep", sleep)
    free, pace = Pace(None), Pace(60)
    for each in (free, pace, pace, pace):
        await each.take()
    pace.correct(-1)
    await pace.take()

    assert waited == [0.0, 1.0, 2.0, 2.0]


def test_certificates_of_the_system_and_of_certifi_are_trusted():
    context = chat_client._ssl_context()

    assert context.check_hostname
    assert context.cert_store_stats()["x509_ca"] > 0


@asynccontextmanager
async def told_requests():
    """Serve an API; yield its address and a list of (path, query, key headers) of each request."""
    seen = []

    async def handle(request):
        keys = (request.headers.get("Authorization"), request.headers.get("api-key"))
        seen.append((request.path, request.query_string, *keys))
        return web.json_response(HELLO)

    async with server(handle) as address:
        yield address, seen


async def played(**options) -> None:
    """Ask once with an engine of these options."""
    engine = OpenAIChatEngine("gpt", **options)
    try:
        await engine.chat(ASK, [], Sampling())
    finally:
        await engine.close()


async def test_a_deployment_on_azure_is_reached_by_its_address_and_its_header(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of another account")
    async with told_requests() as (address, seen):
        place = f"{address}/openai/deployments/gpt/?api-version=2026-01-01"
        await played(base_url=place, api_key="", headers={"api-key": "azure"})

    assert seen == [("/openai/deployments/gpt/chat/completions", "api-version=2026-01-01", None, "azure")]


@pytest.mark.parametrize("is_async", [False, True], ids=["function", "coroutine"])
async def test_a_key_that_expires_is_asked_for_before_each_request(is_async):
    tokens = iter(["first", "second"])

    async def coming():
        return next(tokens)

    async with told_requests() as (address, seen):
        engine = OpenAIChatEngine(
            "gpt", base_url=f"{address}/openai/v1", api_key=coming if is_async else lambda: next(tokens)
        )
        for _ in range(2):
            await engine.chat(ASK, [], Sampling())
        await engine.close()

    assert [request[2] for request in seen] == ["Bearer first", "Bearer second"]


async def test_a_recorded_run_holds_no_key(tmp_path):
    async with told_requests() as (address, seen):
        options = {"base_url": address, "api_key": lambda: "SECRET", "headers": {"api-key": "SECRET"}}
        result = await asyncio.to_thread(
            evaluate, "agentenv/Calculator-v0", "openai:m", num_tasks=1, engine=options, runs_dir=tmp_path
        )

    assert seen[0] == ("/", "", None, None), "what is asked whether it answers gets no key"
    assert seen[1][2:] == ("Bearer SECRET", "SECRET")
    assert result.run is not None
    files = [file for file in result.run.path.rglob("*") if file.is_file()]
    assert "run.json" in {file.name for file in files}
    assert not [file for file in files if b"SECRET" in file.read_bytes()]


async def test_a_key_that_cannot_be_had_is_an_error_of_the_engine():
    def refused():
        raise RuntimeError("no login")

    async with told_requests() as (address, seen):
        with pytest.raises(EngineUnavailable, match="no login"):
            await played(base_url=address, api_key=refused)

    assert not seen


@pytest.mark.parametrize("name", ["Authorization", "authorization"])
async def test_a_header_of_ones_own_wins_over_the_key(name):
    async with told_requests() as (address, seen):
        await played(base_url=address, api_key="k", headers={name: "Basic x"})

    assert [request[2] for request in seen] == ["Basic x"]


async def test_a_server_without_keys_gets_none(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with told_requests() as (address, seen):
        await played(base_url=address)

    assert [request[2] for request in seen] == [None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("piece", [b" " * 1_000_000, b"data: {}\n\n" * 100_000])
async def test_an_answer_without_an_end_is_not_read_to_it(piece, stream, monkeypatch):
    monkeypatch.setattr(chat_client, "bounded", partial(chat_client.bounded, most=2_000_000))
    monkeypatch.setattr(chat_client, "read_bounded", partial(chat_client.read_bounded, most=2_000_000))

    async def endless(request):
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream" if stream else "text/json"})
        await answer.prepare(request)
        while True:
            await answer.write(piece)

    async with client_on(endless) as client:
        with pytest.raises(Unreadable, match="more than 2,000,000 bytes"):
            await client.send({"messages": ASK}, stream=stream)


async def test_an_answer_that_is_nested_too_deep_is_told_in_words():
    async def deep(request):
        return web.Response(body=b"[" * 100_000 + b"]" * 100_000, content_type="application/json")

    async with client_on(deep) as client:
        with pytest.raises(Unreadable, match="is no JSON"):
            await client.send({"messages": ASK}, stream=False)
