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
from agentenv.engine import Sampling
from agentenv.runs import evaluate
from agentenv_providers import OpenAIChatEngine
from agentenv_providers.openai import client as chat_client
from agentenv_providers.openai.client import ChatClient, Pace, Patience
from agentenv_providers.openai.errors import ChatFailure
from agentenv_providers.openai.reply import Unreadable
from helpers.servers import http_server, planned, streamed

ASK = [{"role": "user", "content": "hi"}]
HELLO = {"choices": [{"index": 0, "message": {"content": "hello"}, "finish_reason": "stop"}]}


def delta(text):
    said = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    return json.dumps(said).encode()


async def send(handler, messages=ASK, *, stream=False):
    """Return what a client makes of the answer of a server with this handler, or of an address."""
    if not isinstance(handler, str):
        async with http_server(handler) as address:
            return await send(f"{address}/v1/", messages, stream=stream)
    client = ChatClient(handler, "k", headers={}, retry_s=0, timeout_s=30.0)
    try:
        return await client.send({"messages": messages}, stream=stream)
    finally:
        await client.close()


def blocks(*parts):
    return partial(streaming, parts)


async def streaming(parts, request):
    return await streamed(request, *parts)


SAID, LONG = delta("hello"), delta("x" * 300_000)
EVENTS = {
    "plain": [b"data: " + SAID + b"\n\ndata: [DONE]\n\n"],
    "no space, carriage returns": [b"data:" + SAID + b"\r\n\r\ndata:[DONE]\r\n\r\n"],
    "comments and other fields": [b": ping\n\nevent: message\nid: 4\nretry: 9\ndata: " + SAID + b"\n\n"],
    "cut anywhere": [bytes([byte]) for byte in b"data: " + SAID + b"\n\n"],
    "several lines": [b"data: " + SAID.replace(b", ", b",\ndata: ") + b"\n\n"],
    "no blank line at the end": [b"data: " + SAID],
    "one newline at the end": [b"data: " + SAID + b"\n"],
    "more after the end": [b"data: " + SAID + b"\n\ndata: [DONE]\n\ndata: nonsense\n\n"],
    "a long one": [b"data: " + LONG + b"\n\n"],
}


@pytest.mark.parametrize("name", EVENTS)
async def test_events_are_read_however_they_are_written(name):
    answer = await send(blocks(*EVENTS[name]), stream=True)

    assert answer["choices"][0]["message"]["content"] == ("x" * 300_000 if name == "a long one" else "hello")


@pytest.mark.parametrize(("error", "said"), [("overloaded", "overloaded"), ({"code": 1}, '{"code": 1}')])
async def test_an_error_within_a_stream_is_said(error, said):
    with pytest.raises(ChatFailure, match=said) as caught:
        await send(blocks(b"data: " + json.dumps({"error": error}).encode() + b"\n\n"), stream=True)

    assert (caught.value.status_code, caught.value.body, caught.value.reached) == (None, error, True)


async def test_a_request_carries_the_scope_and_the_key_and_no_password_of_netrc(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("OPENAI_ORG_ID", "org")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project")
    async with planned(HELLO) as api:
        await send(f"{api.url}/v1/", [{"role": "user", "content": "\ud800"}])

    (request,) = api.requests
    assert request.path == "/v1/chat/completions"
    names = ("Authorization", "OpenAI-Organization", "OpenAI-Project")
    assert [request.headers[name] for name in names] == ["Bearer k", "org", "project"]
    assert '"\\ud800"' in await request.text()


@pytest.mark.parametrize("excepted", [False, True])
async def test_the_proxy_of_the_environment_is_used_but_for_what_it_excepts(monkeypatch, excepted):
    async with planned(HELLO) as api:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        proxy = "http://127.0.0.1:9" if excepted else api.url
        monkeypatch.setenv("http_proxy", proxy.replace("//", "//me:secret@"))
        if excepted:
            monkeypatch.setenv("no_proxy", "127.0.0.1")
        address = api.url if excepted else "http://model.example"
        await send(f"{address}/v1")

    (request,) = api.requests
    assert str(request.url) == f"{address}/v1/chat/completions"
    assert request.headers.get("Proxy-Authorization") == (None if excepted else "Basic bWU6c2VjcmV0")


@pytest.mark.parametrize("retry_s", [30, 0])
async def test_an_api_that_says_nothing_is_asked_again_or_timed_out(monkeypatch, retry_s):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_S", 0.0)
    asked = 0

    async def handle(request):
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.Event().wait()
        return web.json_response(HELLO)

    async with http_server(handle) as address:
        limits = {"retry_s": retry_s, "timeout_s": 1 if retry_s else 0.05}
        engine = OpenAIChatEngine("m", base_url=f"{address}/v1", api_key="k", **limits)
        if retry_s:
            assert (await engine.chat(ASK, [], Sampling())).message["content"] == "hello"
        else:
            with pytest.raises(EngineUnavailable, match="did not answer in time"):
                await engine.chat(ASK, [], Sampling())
        await engine.close()

    assert asked == (2 if retry_s else 1)


async def test_an_api_that_keeps_failing_is_told_once_while_it_is_asked_again(monkeypatch, caplog):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_S", 0.0)
    answers = iter([web.Response(status=502) for _ in range(4)] + [web.json_response(HELLO)])

    async def handle(request):
        return next(answers)

    async with http_server(handle) as address:
        engine = OpenAIChatEngine("m", base_url=f"{address}/v1", api_key="k", retry_s=30)
        await engine.chat(ASK, [], Sampling())
        await engine.close()

    assert [record.getMessage() for record in caplog.records] == [
        "502 Bad Gateway; the request is sent again, for up to 30 s"
    ]


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
async def asked(**options):
    """Yield an engine with these options, and (path, query, key headers) of each of its requests."""
    async with planned(then=lambda _: HELLO) as api:
        options["base_url"] = api.url + options.pop("path", "")
        engine = OpenAIChatEngine("gpt", **options)
        seen = []
        try:
            yield engine, seen
        finally:
            await engine.close()
        for request in api.requests:
            keys = (request.headers.get("Authorization"), request.headers.get("api-key"))
            seen.append((request.path, request.query_string, *keys))


AZURE = "/openai/deployments/gpt/?api-version=2026-01-01"


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (
            {"path": AZURE, "api_key": "", "headers": {"api-key": "azure"}},
            ("/openai/deployments/gpt/chat/completions", "api-version=2026-01-01", None, "azure"),
        ),
        (
            {"api_key": "k", "headers": {"authorization": "Basic x"}},
            ("/chat/completions", "", "Basic x", None),
        ),
        (
            {"api_key": "k", "headers": {"Authorization": "Basic x"}},
            ("/chat/completions", "", "Basic x", None),
        ),
        ({}, ("/chat/completions", "", "Bearer of the environment", None)),
        ({"api_key": ""}, ("/chat/completions", "", None, None)),
    ],
    ids=["azure", "own header", "own header in capitals", "environment", "no key"],
)
async def test_an_api_gets_the_key_that_is_meant_for_it(monkeypatch, options, sent):
    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
    async with asked(**options) as (engine, seen):
        await engine.chat(ASK, [], Sampling())

    assert seen == [sent]


@pytest.mark.parametrize("is_async", [False, True], ids=["function", "coroutine"])
async def test_a_key_that_expires_is_asked_for_before_each_request(is_async):
    tokens = iter(["first", "second"])

    async def coming():
        return next(tokens)

    async with asked(api_key=coming if is_async else lambda: next(tokens)) as (engine, seen):
        for _ in range(2):
            await engine.chat(ASK, [], Sampling())

    assert [request[2] for request in seen] == ["Bearer first", "Bearer second"]


async def test_a_key_that_cannot_be_had_is_an_error_of_the_engine():
    def refused():
        raise RuntimeError("no login")

    async with asked(api_key=refused) as (engine, seen):
        with pytest.raises(EngineUnavailable, match="no login"):
            await engine.chat(ASK, [], Sampling())

    assert not seen


async def test_a_recorded_run_holds_no_key(tmp_path):
    async with planned(then=lambda _: HELLO) as api:
        options = {"base_url": api.url, "api_key": lambda: "SECRET", "headers": {"api-key": "SECRET"}}
        result = await asyncio.to_thread(
            evaluate, "agentenv/Calculator-v0", "openai:m", num_tasks=1, engine=options, runs_dir=tmp_path
        )

    keys = [
        (request.headers.get("Authorization"), request.headers.get("api-key")) for request in api.requests
    ]
    assert (api.requests[0].path, keys[0]) == ("/", (None, None)), "the first asks only whether it answers"
    assert keys[1] == ("Bearer SECRET", "SECRET")
    assert result.run is not None
    files = [file for file in result.run.path.rglob("*") if file.is_file()]
    assert "run.json" in {file.name for file in files}
    assert not [file for file in files if b"SECRET" in file.read_bytes()]


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

    with pytest.raises(Unreadable, match="more than 2,000,000 bytes"):
        await send(endless, stream=stream)


async def test_an_answer_that_is_nested_too_deep_is_told_in_words():
    deep = partial(web.Response, body=b"[" * 100_000 + b"]" * 100_000, content_type="application/json")
    async with planned(deep) as api:
        with pytest.raises(Unreadable, match="is no JSON"):
            await send(api.url)
