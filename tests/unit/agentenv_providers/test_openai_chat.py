"""The chat engine against a loopback server that keeps OpenAI's protocol, faults included."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import pytest
from aiohttp import web
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter

from agentenv.core import ContextTooLong, EngineError, EngineUnavailable, UsageError
from agentenv.engine import ChatEngine, Sampling
from agentenv.engine.interface import Usage
from agentenv.render.protocol import ReplyForm
from agentenv_providers import OpenAIChatEngine
from agentenv_providers.openai import client as chat_client
from helpers.servers import http_server, planned
from scenes import Tools, play

PARAMETERS = {"type": "object", "properties": {"a": {}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}
ASK = [{"role": "user", "content": "hi"}]
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "completion_tokens_details": {"reasoning_tokens": 3},
    "prompt_tokens_details": {"cached_tokens": 8},
}
PRICES = {"price_in": 2.0, "price_out": 4.0}
HEAD = {"id": "x", "created": 1, "model": "m"}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_S", 0.0)


def call(number, name="add", arguments='{"a": 1}'):
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(finish="stop", **message):
    said = {"role": "assistant", "content": "hello"} | message
    choice = {"index": 0, "message": said, "finish_reason": finish}
    return {**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}


def chunk(delta=None, finish=None, usage=None):
    choices = [] if usage else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {**HEAD, "object": "chat.completion.chunk", "choices": choices, "usage": usage}


def refusal(status, message, param=None, code=None, **headers):
    body = {"error": {"message": message, "type": "invalid_request_error", "code": code, "param": param}}
    return partial(web.json_response, body, status=status, headers=headers)


def invalid(kind):
    detail = {"type": kind, "loc": ["body", "temperature"], "msg": "No"}
    return partial(web.json_response, {"detail": [detail]}, status=422)


BUSY = refusal(429, "slow down", **{"Retry-After": "0"})


@asynccontextmanager
async def engine_on(*plan, **options):
    """Serve the planned answers in order; yield an engine and the bodies of its requests."""
    async with planned(*plan) as api:
        engine = OpenAIChatEngine("m", base_url=f"{api.url}/v1", api_key="k", **{"retry_s": 120} | options)
        try:
            yield engine, api.bodies
        finally:
            await engine.close()


async def ask(engine, *tools, messages=ASK, form=None, **sampling):
    return await engine.chat(messages, list(tools), Sampling(**sampling), form=form)


async def said(*plan, tools=(TOOL,), **options):
    """Return the answer to one request, for which the answers are planned."""
    async with engine_on(*plan, **options) as (engine, _):
        return await ask(engine, *tools)


async def test_parallel_calls_usage_and_thinking_are_read():
    plan = answer("tool_calls", content=None, tool_calls=[call(1), call(2)], reasoning_content="hm")
    async with engine_on(plan, **PRICES, extra={"reasoning": {"effort": "low"}}) as (engine, seen):
        asked = [{"role": "user", "content": "é\U0001f642"}]
        done = await ask(engine, TOOL, messages=asked, temperature=0.3, seed=4, max_tokens=9, top_k=3)

    assert isinstance(engine, ChatEngine)
    assert done.message["tool_calls"] == [call(1), call(2)]
    assert (done.message["content"], done.message["reasoning_content"]) == ("", "hm")
    assert done.usage == Usage(10, 5, reasoning_tokens=3, cached_tokens=8, cost_usd=pytest.approx(40e-6))
    assert done.finish_reason == "stop"
    drawn = {"temperature": 0.3, "seed": 4, "max_tokens": 9, "top_k": 3}
    assert seen == [
        {"model": "m", "messages": asked, "tools": [TOOL], "reasoning": {"effort": "low"}} | drawn
    ]


@pytest.mark.parametrize(
    ("finish", "read"),
    [
        *[(reason, "length") for reason in ("length", "max_tokens", "MAX_TOKENS")],
        *[(reason, "stop") for reason in ("eos", "STOP", "end_turn", None, "new_word")],
        *[(reason, "content_filter") for reason in ("content_filter", "SAFETY", "refusal")],
    ],
)
async def test_no_finish_reason_discards_the_answer(finish, read):
    done = await said(answer(finish))

    assert (done.finish_reason, done.message["content"]) == (read, "hello")


async def test_a_message_without_choices_is_read():
    done = await said({"message": {"role": "assistant", "content": "hello"}, "done": True})
    assert done.message["content"] == "hello"


@pytest.mark.parametrize("ids", [("x", "x"), ("x_2", "x", "x"), ("", ""), ("x", "x", "x_1", "x_1_")])
async def test_calls_have_distinct_ids(ids):
    done = await said(answer("tool_calls", tool_calls=[call(0) | {"id": id} for id in ids]))

    assert len({one["id"] for one in done.message["tool_calls"]}) == len(ids)


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        (None, 0),
        ({"prompt_tokens": None, "completion_tokens": None}, 0),
        ({"prompt_tokens": "10", "completion_tokens": "5"}, 0),
        ({**USAGE, "cost": 0.25}, 0.25),
    ],
)
async def test_what_the_api_says_of_the_cost_counts_and_what_it_leaves_out_costs_nothing(usage, cost):
    done = await said(answer() | {"usage": usage}, **PRICES)

    assert (done.message["content"], done.usage.cost_usd or 0) == ("hello", cost)


@pytest.mark.parametrize(
    ("headers", "status", "requests"),
    [
        ({"Retry-After": "121"}, 429, 1),
        ({"Retry-After": "0"}, 429, 2),
        ({"Retry-After": "soon"}, 429, 2),
        ({"Retry-After": "nan"}, 429, 2),
        ({"retry-after-ms": "1"}, 503, 2),
        ({"Retry-After": "Sun, 06 Nov 1994 08:49:37 GMT"}, 503, 2),
        ({"Retry-After": "Fri, 06 Nov 2994 08:49:37 GMT"}, 503, 1),
        ({"x-should-retry": "true"}, 402, 2),
        ({"x-should-retry": "false"}, 500, 1),
        ({}, 408, 2),
        ({}, 409, 2),
        ({}, 403, 1),
        ({}, "a closed connection", 2),
    ],
)
async def test_an_api_decides_whether_and_when_it_is_asked_again(headers, status, requests):
    fault = refusal(status, "not now", **headers) if isinstance(status, int) else "close"
    async with engine_on(fault, answer()) as (engine, seen):
        if requests == 1:
            with pytest.raises(EngineError, match="not now"):
                await ask(engine)
        else:
            assert (await ask(engine)).message["content"] == "hello"

    assert len(seen) == requests


def raw(body, status=200):
    return partial(web.Response, body=body, status=status)


WORDS = "did not answer with a chat completion|without a choice"
LIMIT = "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4097"


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (refusal(400, "bad"), EngineError, "refused the request: .*bad"),
        (refusal(401, "Incorrect API key"), EngineError, "401 Unauthorized: Incorrect API key"),
        (refusal(404, "no such model"), EngineError, "404 Not Found: no such model"),
        (BUSY, EngineUnavailable, "429 Too Many Requests: slow down"),
        (refusal(429, "too many tokens: 40000 in this minute"), EngineUnavailable, "in this minute"),
        ({"error": {"message": "upstream is full", "code": 429}}, EngineUnavailable, "upstream is full"),
        ({"error": {"message": "no credit", "code": 402}}, EngineError, "no credit"),
        (answer() | {"error": {"message": "no credit", "code": 402}}, EngineError, "no credit"),
        (raw("<html>"), EngineError, "not answer with a chat completion"),
        ({"nothing": 1}, EngineError, "without a choice"),
        ({"choices": [{"finish_reason": "stop"}]}, EngineError, WORDS),
        ({"choices": [{"message": {"tool_calls": ["x"]}}]}, EngineError, WORDS),
        ({"choices": "none"}, EngineError, WORDS),
        ({"choices": [[]]}, EngineError, WORDS),
        ({"choices": {"a": 1}}, EngineError, WORDS),
        *[(raw(body), EngineError, WORDS) for body in (b"[1]", b"null", b'"text"', b"\xff\xfe")],
        (raw(b'{"error": "' + LIMIT.encode() + b'"}', 422), ContextTooLong, "4097"),
        *[
            (refusal(status, words), ContextTooLong, words[:20])
            for status, words in [
                (413, "Request Entity Too Large"),
                (400, "This model's maximum context length is 9 tokens"),
                (400, "prompt is too long: 208310 tokens > 200000 maximum"),
                (400, "The input token count (1048577) exceeds the maximum number of tokens (1048576)."),
                (400, "the request exceeds the available context size, try increasing it"),
                (400, "This model's maximum prompt length is 131072 but the request contains 140000."),
                (422, LIMIT),
                (400, "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000"),
            ]
        ],
    ],
)
async def test_a_refusal_or_nonsense_is_one_clear_error(reply, error, words):
    with pytest.raises(error, match=words) as caught:
        await said(reply, retry_s=0)
    assert type(caught.value) is error


async def test_an_unreachable_api_is_unavailable():
    engine = OpenAIChatEngine("m", base_url="http://127.0.0.1:9/v1", retry_s=0)
    with pytest.raises(EngineUnavailable, match="Cannot connect"):
        await ask(engine)
    await engine.close()


@pytest.mark.parametrize(
    ("words", "param", "code"),
    [
        ("Unsupported value: 'temperature' does not support 0.5 with this model.", None, None),
        ("Unsupported value.", "temperature", "unsupported_value"),
        ("temperature is not supported with this model", None, None),
        ("Unsupported parameter: temperature", None, None),
        ("This model does not support the parameter `temperature`.", None, None),
    ],
)
async def test_a_parameter_that_is_refused_by_name_or_in_words_is_left_out_from_then_on(words, param, code):
    async with engine_on(refusal(400, words, param, code), answer(), answer()) as (engine, seen):
        for _ in range(2):
            await ask(engine, TOOL, temperature=0.5)

    assert ["temperature" in body for body in seen] == [True, False, False]
    assert all("tools" in body for body in seen)


async def test_reasoning_is_not_sent_back_to_a_server_that_refuses_it():
    refused = refusal(400, "'messages.1' : property 'reasoning_content' is unsupported")
    history = [*ASK, {"role": "assistant", "content": "a", "reasoning_content": "hm"}, *ASK]
    async with engine_on(refused, answer(), answer()) as (engine, seen):
        for _ in range(2):
            await ask(engine, messages=history)

    assert ["reasoning_content" in body["messages"][1] for body in seen] == [True, False, False]
    assert history[1]["reasoning_content"] == "hm"


UNPAIRED = "An assistant message with 'tool_calls' must be followed by tool messages responding to each id."
QUOTED = "Invalid arguments of the call: {'temperature': 20} is not an object that heat takes; tools: heat"


@pytest.mark.parametrize(
    ("words", "param"),
    [
        (UNPAIRED, "messages.[2].role"),
        (UNPAIRED, None),
        (QUOTED, None),
        ("Invalid schema of 'temperature'", "tools[0].function.parameters"),
        ('Invalid message: {"temperature": 20}', None),
    ],
)
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
async def test_an_error_about_one_conversation_changes_no_later_request(words, param, later):
    plan = [answer()] * later + [refusal(400, words, param), answer()]
    async with engine_on(*plan) as (engine, seen):
        if later:
            await ask(engine, TOOL, temperature=0.5)
        with pytest.raises(EngineError, match="refused the request"):
            await ask(engine, TOOL, temperature=0.5)
        await ask(engine, TOOL, temperature=0.5)

    assert all(body["tools"] == [TOOL] and body["temperature"] == 0.5 for body in seen)


async def test_what_a_server_has_accepted_once_is_not_given_up():
    plan = [answer(), refusal(400, "does not support tools"), refusal(400, "no", "temperature"), answer()]
    async with engine_on(*plan, answer()) as (engine, seen):
        await ask(engine, TOOL, temperature=0.5)
        with pytest.raises(EngineError, match="refused the request"):
            await ask(engine, TOOL, temperature=0.5)
        for _ in range(2):
            await ask(engine, TOOL, temperature=0.5)

    assert all("tools" in body for body in seen)
    assert ["temperature" in body for body in seen] == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (refusal(400, "Expected a value <= 2", "temperature", "decimal_above_max_value"), "Expected a value"),
        (invalid("less_than_equal"), r"body\.temperature: No"),
    ],
)
async def test_a_value_out_of_range_is_an_error_and_only_what_is_forbidden_is_left_out(refused, words):
    async with engine_on(refused, invalid("extra_forbidden"), answer()) as (engine, seen):
        with pytest.raises(EngineError, match=words):
            await ask(engine, temperature=0.5)
        await ask(engine, temperature=0.5)

    assert ["temperature" in body for body in seen] == [True, True, False]


@pytest.mark.parametrize(
    ("words", "param"),
    [
        ("gemma:latest does not support tools", None),
        ("No", "tools"),
        ("Tool calling is not supported with this model", None),
        ('"auto" tool choice requires --enable-auto-tool-choice', None),
    ],
)
async def test_a_server_without_tools_gets_them_as_text(words, param):
    written = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    history = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [call(0)]},
        {"role": "tool", "tool_call_id": "c0", "name": "add", "content": "42"},
    ]
    async with engine_on(refusal(400, words, param), answer(content=written)) as (engine, seen):
        done = await ask(engine, TOOL, messages=history)

    assert done.message["content"] == "so"
    assert done.message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert ["tools" in body for body in seen] == [True, False]
    assert "add(" in seen[1]["messages"][0]["content"]
    assert [message["role"] for message in seen[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert "42" in seen[1]["messages"][-1]["content"]


ADD, OTHER, THIRD = ({"type": "function", "function": {"name": name}} for name in ("add", "other", "third"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ADD, OTHER]}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("form", "tools", "fields"),
    [
        (ReplyForm(calls=("add",)), [TOOL], {"tool_choice": ADD}),
        (ReplyForm(calls=("add", "other")), [TOOL, OTHER], {"tool_choice": "required"}),
        (
            ReplyForm(calls=("add",), many=False),
            [TOOL, OTHER],
            {"tool_choice": ADD, "parallel_tool_calls": False},
        ),
        (ReplyForm(calls=("add", "other")), [TOOL, OTHER, THIRD], {"tool_choice": ALLOWED}),
        (ReplyForm(schema={"type": "object"}), [], {"response_format": {"type": "json_object"}}),
        (ReplyForm(schema=SCHEMA), [TOOL], {"response_format": JSON_SCHEMA, "tool_choice": "none"}),
    ],
)
async def test_the_form_of_a_reply_is_asked_for_in_the_words_of_the_api(form, tools, fields):
    async with engine_on(answer()) as (engine, seen):
        await ask(engine, *tools, form=form)

    TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(seen[0])
    asked = ("tool_choice", "response_format", "parallel_tool_calls")
    assert {name: seen[0][name] for name in asked if name in seen[0]} == fields


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize(
    ("name", "words", "form"),
    [
        ("response_format", "Unknown parameter: 'response_format'", ReplyForm(schema=SCHEMA)),
        ("tool_choice", "tool_choice is not supported", ReplyForm(calls=("add",))),
    ],
)
async def test_a_form_that_an_api_refuses_is_left_out_before_the_tools_are(name, words, form, by_name):
    refused = refusal(400, words, name if by_name else None)
    async with engine_on(refused, answer()) as (engine, seen):
        await ask(engine, TOOL, form=form)

    assert [(name in body, "tools" in body) for body in seen] == [(True, True), (False, True)]


def part(index, number=None, name=None, arguments=""):
    return {"index": index, "id": number and f"c{number}", "function": {"name": name, "arguments": arguments}}


async def test_a_streamed_answer_is_joined():
    parts = [
        chunk({"role": "assistant", "content": "hel", "reasoning_content": "h"}),
        chunk({"content": "lo", "reasoning_content": "m"}),
        chunk({"tool_calls": [part(0, 1, "add")]}),
        chunk({"tool_calls": [part(1, 2, "add", "{}")]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]}),
        chunk({}, finish="tool_calls"),
        chunk(usage=USAGE),
        "[DONE]",
    ]
    async with engine_on(parts, stream=True) as (engine, seen):
        done = await ask(engine, TOOL)

    assert (done.message["content"], done.message["reasoning_content"]) == ("hello", "hm")
    assert done.message["tool_calls"] == [call(1), call(2, arguments="{}")]
    assert done.usage.completion_tokens == 5
    assert seen[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    "parts",
    [
        # all calls under one index, each whole
        [part(0, 1, "add", '{"a": 1}'), part(0, 2, "sub", '{"a": 2}')],
        # no index at all
        [part(None, 1, "add", '{"a": 1}'), part(None, 2, "sub", '{"a": 2}')],
        # another id with each piece of a call
        [part(0, 1, "add"), part(0, 8, None, '{"a": 1}'), part(1, 2, "sub"), part(1, 9, None, '{"a": 2}')],
    ],
)
async def test_streamed_calls_are_told_apart_whatever_the_server_counts(parts):
    events = [*(chunk({"tool_calls": [each]}) for each in parts), chunk({}, finish="tool_calls")]
    done = await said(events, stream=True)

    assert done.message["tool_calls"] == [call(1), call(2, "sub", '{"a": 2}')]


async def test_a_streamed_answer_has_all_that_a_whole_one_has():
    old = {"name": "add", "arguments": '{"a": 1}'}
    whole = answer("function_call", content=None, refusal="I cannot.", reasoning="hm", function_call=old)
    done = [
        await said(whole),
        await said(
            [
                chunk({"refusal": "I can", "reasoning": "h"}),
                chunk({"refusal": "not.", "function_call": {"name": "add", "arguments": '{"a": '}}),
                chunk({"function_call": {"arguments": "1}"}, "reasoning": "m"}),
                chunk(None, finish="function_call"),
                chunk(usage=USAGE),
            ],
            stream=True,
        ),
    ]
    for each in done:  # a call in the old form has no id, so that it gets one
        each.message["tool_calls"][0]["id"] = "made"
    assert done[0] == done[1]
    assert (done[0].message["content"], done[0].message["reasoning_content"]) == ("I cannot.", "hm")


async def test_a_stream_that_names_no_finish_reason_but_counts_its_tokens_is_complete():
    done = await said([chunk({"content": "hello"}), chunk(usage=USAGE), "[DONE]"], stream=True)

    assert (done.message["content"], done.finish_reason) == ("hello", "stop")


@pytest.mark.parametrize(
    ("last", "error", "words"),
    [
        ([], EngineUnavailable, "middle of the answer"),
        (["[DONE]"], EngineUnavailable, "ended in the middle of the answer"),
        (["close"], EngineUnavailable, "ClientPayloadError"),
        *[
            ([{"error": {"message": "slow down", "code": code}}], EngineUnavailable, "slow down")
            for code in (429, "rate_limit_exceeded", 503)
        ],
        ([{"error": {"message": "overloaded", "code": 418}}], EngineError, "overloaded"),
    ],
)
async def test_a_stream_that_breaks_is_an_error_and_may_be_tried_again_after_load(last, error, words):
    with pytest.raises(error, match=words) as caught:
        await said([chunk({"content": "a"}), *last], stream=True)
    assert type(caught.value) is error


async def test_an_environment_is_played_with_parallel_calls_and_never_trained_on():
    calls = [call(1, "double", '{"number": 2}'), call(2, "double", '{"number": 4}')]
    plan = [BUSY, answer("tool_calls", content=None, tool_calls=calls), answer(content="4 and 8")]
    async with engine_on(*plan, **PRICES) as (engine, seen):
        played = await play(Tools(), engine, max_turns=4)

    results = [(one["tool_call_id"], one["content"]) for one in seen[2]["messages"][2:]]
    assert results == [("c1", "4"), ("c2", "8")]
    assert (played.stop_reason, played.reward, len(played.turns)) == ("final_answer", 1.0, 2)
    assert (played.sequences, played.trainable) == ((), False)
    assert "no token ids" in played.untrainable_reason
    assert played.metrics["cost_usd"] == pytest.approx(80e-6)
    assert (played.metrics["prompt_tokens"], played.metrics["cached_tokens"]) == (20, 16)


async def test_a_deadline_aborts():
    async def silent(_):
        await asyncio.Event().wait()

    async with http_server(silent) as url:
        engine = OpenAIChatEngine("m", base_url=url, api_key="k")
        done = await engine.chat(ASK, [], Sampling(), deadline_s=0.01)
        await engine.close()

    assert (done.finish_reason, done.message["content"]) == ("abort", "")


async def test_a_missing_key_and_what_it_cannot_do_are_usage_errors(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(UsageError, match="OPENAI_API_KEY"):
        OpenAIChatEngine("gpt")
    engine = OpenAIChatEngine("m", base_url="http://127.0.0.1:9")
    with pytest.raises(UsageError, match="adapter"):
        await ask(engine, adapter="x")
    with pytest.raises(UsageError, match="cannot sample by a grammar"):
        await ask(engine, grammar="x")


@pytest.mark.parametrize("closes", [True, False])
def test_the_next_event_loop_may_use_an_engine_and_have_more_requests_than_go_at_once(closes):
    engine = OpenAIChatEngine("m", base_url="http://127.0.0.1:1/v1", api_key="k", concurrency=1)

    async def refuse():
        raise RuntimeError("Event loop is closed")

    async def several():
        async with planned(*[answer()] * 3) as api:
            engine.address = api.url
            done = await asyncio.gather(*(ask(engine) for _ in range(3)))
            if closes:
                await engine.close()
            else:
                await engine._client.close()  # or the test would leave the connection open
                engine._client.close = refuse  # as it is with an open connection of an ended loop
        return [one.finish_reason for one in done]

    assert [asyncio.run(several()) for _ in range(2)] == [["stop"] * 3] * 2
    asyncio.run(engine.close())
    asyncio.run(engine.close())
