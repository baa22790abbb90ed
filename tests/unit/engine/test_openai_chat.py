"""The chat engine against a loopback server that keeps OpenAI's protocol, faults included."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter

import agentenv as ae
from agentenv.core import ContextTooLong, EngineError, EngineUnavailable, RunLimits, UsageError
from agentenv.engine import ChatEngine, OpenAIChatEngine, Sampling, chat_client
from agentenv.render.protocol import ReplyForm
from agentenv.runner import Runner

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {}}},
    },
}
ASK = [{"role": "user", "content": "hi"}]
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "completion_tokens_details": {"reasoning_tokens": 3},
    "prompt_tokens_details": {"cached_tokens": 8},
}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_S", 0.0)


def call(number, name="add", arguments='{"a": 1}'):
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(finish="stop", **message):
    said = {"role": "assistant", "content": "hello"} | message
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": said, "finish_reason": finish}],
        "usage": USAGE,
    }


def refusal(status, message, param=None, code=None, **headers):
    body = {"error": {"message": message, "type": "invalid_request_error", "code": code, "param": param}}
    return web.json_response(body, status=status, headers=headers)


def chunk(delta, finish=None, usage=None):
    choices = [] if usage else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": choices,
        "usage": usage,
    }


@asynccontextmanager
async def engine_on(*plan, **options):
    """Serve the planned answers in order: a dict is JSON, a list a stream, a response goes as it is."""
    seen = []
    left = list(plan)

    async def chat(request):
        seen.append(await request.json())
        planned = left.pop(0)
        if planned == "close":
            request.transport.close()
            return web.Response()
        if isinstance(planned, dict):
            return web.json_response(planned)
        if isinstance(planned, web.Response):
            return planned
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for event in planned:
            if event == "close":
                request.transport.close()
                break
            text = event if isinstance(event, str) else json.dumps(event)
            await stream.write(f"data: {text}\n\n".encode())
        await stream.write_eof()
        return stream

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
    engine = OpenAIChatEngine("m", base_url=url, api_key="k", **{"retry_s": 120} | options)
    try:
        yield engine, seen
    finally:
        await engine.close()
        await runner.cleanup()


async def test_parallel_calls_usage_and_thinking_are_read():
    said = answer("tool_calls", content=None, tool_calls=[call(1), call(2)], reasoning_content="hm")
    async with engine_on(said, price_in=2.0, price_out=4.0) as (engine, seen):
        done = await engine.chat(ASK, [TOOL], Sampling(temperature=0.3, seed=4, max_tokens=9))

    assert isinstance(engine, ChatEngine)
    assert done.message["tool_calls"] == [call(1), call(2)]
    assert (done.message["content"], done.message["reasoning_content"]) == ("", "hm")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (10, 5)
    assert (done.usage.reasoning_tokens, done.usage.cached_tokens) == (3, 8)
    assert done.usage.cost_usd == pytest.approx(40e-6)
    assert done.finish_reason == "stop"
    assert seen[0]["tools"] == [TOOL]
    assert (seen[0]["temperature"], seen[0]["seed"], seen[0]["max_tokens"]) == (0.3, 4, 9)


@pytest.mark.parametrize(
    ("said", "read"),
    [
        *[(reason, "length") for reason in ("length", "max_tokens", "MAX_TOKENS")],
        *[(reason, "stop") for reason in ("eos", "STOP", "end_turn", None, "new_word")],
        *[(reason, "content_filter") for reason in ("content_filter", "SAFETY", "refusal")],
    ],
)
async def test_no_finish_reason_discards_the_answer(said, read):
    async with engine_on(answer(said)) as (engine, _):
        done = await engine.chat(ASK, [], Sampling())

    assert (done.finish_reason, done.message["content"]) == (read, "hello")


async def test_an_answer_that_the_server_broke_off_may_be_tried_again():
    async with engine_on(answer("error")) as (engine, _):
        with pytest.raises(EngineUnavailable, match="broke off"):
            await engine.chat(ASK, [], Sampling())


async def test_a_single_call_in_the_old_form_is_read():
    function = {"name": "add", "arguments": '{"a": 1}'}
    async with engine_on(answer("function_call", content=None, function_call=function)) as (engine, _):
        done = await engine.chat(ASK, [TOOL], Sampling())

    assert [call["function"] for call in done.message["tool_calls"]] == [function]
    assert done.finish_reason == "stop"


@pytest.mark.parametrize("ids", [("x", "x"), ("x_2", "x", "x"), ("", ""), ("x", "x", "x_1", "x_1_")])
async def test_calls_have_distinct_ids(ids):
    calls = [call(0) | {"id": id} for id in ids]
    async with engine_on(answer("tool_calls", tool_calls=calls)) as (engine, _):
        done = await engine.chat(ASK, [TOOL], Sampling())

    assert len({one["id"] for one in done.message["tool_calls"]}) == len(ids)


NASTY = [
    {"choices": [{"finish_reason": "stop"}]},
    {"choices": [{"message": None, "finish_reason": "stop"}]},
    {"choices": [{"message": {"tool_calls": ["x"]}}]},
    {"choices": "none"},
    {"choices": [[]]},
    {"choices": {"a": 1}},
    web.json_response([1]),
    web.json_response(None),
    web.json_response("text"),
    web.Response(body=b""),
    web.Response(body=b"\xff\xfe"),
]


@pytest.mark.parametrize("said", NASTY)
async def test_an_answer_of_another_form_is_an_error_of_the_engine(said):
    async with engine_on(said) as (engine, _):
        with pytest.raises(EngineError, match=r"did not answer with a chat completion|without a choice"):
            await engine.chat(ASK, [], Sampling())


@pytest.mark.parametrize(
    ("headers", "status", "requests"),
    [
        ({"Retry-After": "121"}, 429, 1),
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
    ],
)
async def test_an_api_decides_whether_and_when_it_is_asked_again(headers, status, requests):
    async with engine_on(refusal(status, "not now", **headers), answer()) as (engine, seen):
        if requests == 1:
            with pytest.raises(EngineError, match="not now"):
                await engine.chat(ASK, [], Sampling())
        else:
            await engine.chat(ASK, [], Sampling())

    assert len(seen) == requests


async def test_further_parameters_and_text_beyond_utf_8_are_sent():
    async with engine_on(answer(), extra={"reasoning": {"effort": "low"}}) as (engine, seen):
        await engine.chat([{"role": "user", "content": "é\U0001f642"}], [], Sampling(top_k=3))

    assert (seen[0]["reasoning"], seen[0]["top_k"]) == ({"effort": "low"}, 3)
    assert seen[0]["messages"][0]["content"] == "é\U0001f642"
    assert "extra_body" not in seen[0]


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {"prompt_tokens": None, "completion_tokens": None},
        {"prompt_tokens": "10", "completion_tokens": "5"},
    ],
)
async def test_counts_that_the_api_leaves_out_or_gives_as_text_cost_nothing(usage):
    async with engine_on(answer() | {"usage": usage}, price_in=2.0, price_out=4.0) as (engine, _):
        done = await engine.chat(ASK, [], Sampling())

    assert done.message["content"] == "hello"
    assert not done.usage.cost_usd


async def test_reasoning_is_not_sent_back_to_a_server_that_refuses_it():
    refused = refusal(400, "'messages.1' : property 'reasoning_content' is unsupported")
    history = [*ASK, {"role": "assistant", "content": "a", "reasoning_content": "hm"}, *ASK]
    async with engine_on(refused, answer(), answer()) as (engine, seen):
        await engine.chat(history, [], Sampling())
        await engine.chat(history, [], Sampling())

    assert ["reasoning_content" in body["messages"][1] for body in seen] == [True, False, False]
    assert history[1]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (413, "Request Entity Too Large"),
        (400, "prompt is too long: 208310 tokens > 200000 maximum"),
        (400, "The input token count (1048577) exceeds the maximum number of tokens allowed (1048576)."),
        (400, "the request exceeds the available context size, try increasing it"),
        (400, "This model's maximum prompt length is 131072 but the request contains 140000 tokens."),
        (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4097"),
        (400, "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000"),
    ],
)
async def test_a_conversation_that_does_not_fit_is_said_in_one_way(status, said):
    async with engine_on(refusal(status, said)) as (engine, _):
        with pytest.raises(ContextTooLong):
            await engine.chat(ASK, [], Sampling())


@pytest.mark.parametrize(
    "fault",
    [refusal(429, "slow down", **{"Retry-After": "0"}), refusal(503, "busy"), "close"],
    ids=["429", "503", "closed"],
)
async def test_rate_limits_and_broken_connections_are_retried(fault):
    async with engine_on(fault, answer()) as (engine, seen):
        done = await engine.chat(ASK, [], Sampling())

    assert done.message["content"] == "hello"
    assert len(seen) == 2


async def test_an_api_that_stays_busy_is_unavailable():
    busy = refusal(429, "slow down", **{"Retry-After": "0"})
    async with engine_on(busy, retry_s=0) as (engine, _):
        with pytest.raises(EngineUnavailable, match="429 Too Many Requests: slow down"):
            await engine.chat(ASK, [], Sampling())


async def test_an_unreachable_api_is_unavailable():
    engine = OpenAIChatEngine("m", base_url="http://127.0.0.1:9/v1", retry_s=0)
    with pytest.raises(EngineUnavailable, match="Cannot connect"):
        await engine.chat(ASK, [], Sampling())
    await engine.close()


async def test_a_refused_parameter_is_left_out_from_then_on():
    refused = refusal(400, "Unsupported value: 'temperature' does not support 0.5 with this model.")
    async with engine_on(refused, answer(), answer()) as (engine, seen):
        await engine.chat(ASK, [], Sampling(temperature=0.5))
        await engine.chat(ASK, [], Sampling(temperature=0.5))

    assert ["temperature" in body for body in seen] == [True, False, False]


@pytest.mark.parametrize(
    ("said", "param", "code"),
    [
        ("Unsupported value.", "temperature", "unsupported_value"),
        ("temperature is not supported with this model", None, None),
        ("Unsupported parameter: temperature", None, None),
        ("This model does not support the parameter `temperature`.", None, None),
    ],
)
async def test_a_parameter_is_refused_by_name_or_in_words(said, param, code):
    async with engine_on(refusal(400, said, param, code), answer()) as (engine, seen):
        await engine.chat(ASK, [TOOL], Sampling(temperature=0.5))

    assert ["temperature" in body for body in seen] == [True, False]
    assert "tools" in seen[1]


UNPAIRED = "An assistant message with 'tool_calls' must be followed by tool messages responding to each id."
QUOTED = "Invalid arguments of the call: {'temperature': 20} is not an object that heat takes; tools: heat"


@pytest.mark.parametrize(
    ("said", "param"),
    [
        (UNPAIRED, "messages.[2].role"),
        (UNPAIRED, None),
        (QUOTED, None),
        ("Invalid schema of 'temperature'", "tools[0].function.parameters"),
        ('Invalid message: {"temperature": 20}', None),
    ],
)
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
async def test_an_error_about_one_conversation_changes_no_later_request(said, param, later):
    plan = [answer()] * later + [refusal(400, said, param), answer()]
    async with engine_on(*plan) as (engine, seen):
        if later:
            await engine.chat(ASK, [TOOL], Sampling(temperature=0.5))
        with pytest.raises(EngineError, match="refused the request"):
            await engine.chat(ASK, [TOOL], Sampling(temperature=0.5))
        await engine.chat(ASK, [TOOL], Sampling(temperature=0.5))

    assert all(body["tools"] == [TOOL] and body["temperature"] == 0.5 for body in seen)


async def test_what_a_server_has_accepted_once_is_not_given_up():
    no_tools = refusal(400, "does not support tools")
    plan = [answer(), no_tools, refusal(400, "no", "temperature"), answer(), answer()]
    async with engine_on(*plan) as (engine, seen):
        await engine.chat(ASK, [TOOL], Sampling(temperature=0.5))
        with pytest.raises(EngineError, match="refused the request"):
            await engine.chat(ASK, [TOOL], Sampling(temperature=0.5))
        for _ in range(2):
            await engine.chat(ASK, [TOOL], Sampling(temperature=0.5))

    assert all("tools" in body for body in seen)
    assert ["temperature" in body for body in seen] == [True, True, True, False, True]


async def test_a_value_out_of_range_is_an_error_and_not_left_out():
    refused = refusal(400, "Expected a value <= 2", "temperature", "decimal_above_max_value")
    async with engine_on(refused) as (engine, _):
        with pytest.raises(EngineError, match="Expected a value"):
            await engine.chat(ASK, [], Sampling(temperature=5.0))


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ("gemma:latest does not support tools", None),
        ("No", "tools"),
        ("Tool calling is not supported with this model", None),
    ],
)
async def test_tools_that_a_server_does_not_take_are_sent_as_text(said, param):
    async with engine_on(refusal(400, said, param), answer()) as (engine, seen):
        await engine.chat(ASK, [TOOL], Sampling())

    assert ["tools" in body for body in seen] == [True, False]


ADD = {"type": "function", "function": {"name": "add"}}
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


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
        (
            ReplyForm(calls=("add", "other")),
            [TOOL, OTHER, {"type": "function", "function": {"name": "third"}}],
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [ADD, {"type": "function", "function": {"name": "other"}}],
                    },
                }
            },
        ),
        (ReplyForm(schema={"type": "object"}), [], {"response_format": {"type": "json_object"}}),
        (
            ReplyForm(schema=SCHEMA),
            [TOOL],
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "reply", "schema": SCHEMA},
                },
                "tool_choice": "none",
            },
        ),
    ],
)
async def test_the_form_of_a_reply_is_asked_for_in_the_words_of_the_api(form, tools, fields):
    async with engine_on(answer()) as (engine, seen):
        await engine.chat(ASK, tools, Sampling(), form=form)

    TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(seen[0])
    asked = ("tool_choice", "response_format", "parallel_tool_calls")
    assert {name: seen[0][name] for name in asked if name in seen[0]} == fields


@pytest.mark.parametrize("param", ["response_format", None])
async def test_a_form_that_an_api_refuses_is_left_out(param):
    refused = refusal(400, "Unknown parameter: 'response_format'", param)
    async with engine_on(refused, answer()) as (engine, seen):
        await engine.chat(ASK, [], Sampling(), form=ReplyForm(schema=SCHEMA))

    assert ["response_format" in body for body in seen] == [True, False]


@pytest.mark.parametrize("param", ["tool_choice", None])
async def test_a_choice_of_tools_is_left_out_before_the_tools_are(param):
    refused = refusal(400, "tool_choice is not supported", param)
    async with engine_on(refused, answer()) as (engine, seen):
        await engine.chat(ASK, [TOOL], Sampling(), form=ReplyForm(calls=("add",)))

    assert [("tool_choice" in body, "tools" in body) for body in seen] == [(True, True), (False, True)]


async def test_an_error_that_is_only_a_text_is_read():
    body = {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4097"}
    async with engine_on(web.json_response(body, status=422)) as (engine, _):
        with pytest.raises(ContextTooLong, match="4097"):
            await engine.chat(ASK, [], Sampling())


def invalid(kind):
    detail = {"type": kind, "loc": ["body", "temperature"], "msg": "No"}
    return web.json_response({"detail": [detail]}, status=422)


async def test_a_validation_error_refuses_only_what_it_forbids():
    async with engine_on(invalid("less_than_equal"), invalid("extra_forbidden"), answer()) as (engine, seen):
        with pytest.raises(EngineError, match=r"body\.temperature: No"):
            await engine.chat(ASK, [], Sampling(temperature=0.5))
        await engine.chat(ASK, [], Sampling(temperature=0.5))

    assert ["temperature" in body for body in seen] == [True, True, False]


async def test_a_server_without_tools_gets_them_as_text():
    written = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    refused = refusal(400, '"auto" tool choice requires --enable-auto-tool-choice')
    history = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [call(0)]},
        {"role": "tool", "tool_call_id": "c0", "name": "add", "content": "42"},
    ]
    async with engine_on(refused, answer(content=written)) as (engine, seen):
        done = await engine.chat(history, [TOOL], Sampling())

    assert done.message["content"] == "so"
    assert done.message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert "tools" not in seen[1]
    assert "add(" in seen[1]["messages"][0]["content"]
    assert [message["role"] for message in seen[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert "42" in seen[1]["messages"][-1]["content"]


async def test_a_streamed_answer_is_joined():
    parts = [
        chunk({"role": "assistant", "content": "hel", "reasoning_content": "h"}),
        chunk({"content": "lo", "reasoning_content": "m"}),
        chunk(
            {
                "tool_calls": [
                    {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}}
                ]
            }
        ),
        chunk(
            {
                "tool_calls": [
                    {
                        "index": 1,
                        "id": "c2",
                        "type": "function",
                        "function": {"name": "add", "arguments": "{}"},
                    }
                ]
            }
        ),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]}),
        chunk({}, finish="tool_calls"),
        chunk({}, usage=USAGE),
        "[DONE]",
    ]
    async with engine_on(parts, stream=True) as (engine, seen):
        done = await engine.chat(ASK, [TOOL], Sampling())

    assert (done.message["content"], done.message["reasoning_content"]) == ("hello", "hm")
    assert done.message["tool_calls"] == [call(1), call(2, arguments="{}")]
    assert done.usage.completion_tokens == 5
    assert seen[0]["stream_options"] == {"include_usage": True}


def part(index, number=None, name=None, arguments=""):
    return {"index": index, "id": number and f"c{number}", "function": {"name": name, "arguments": arguments}}


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
    async with engine_on(events, stream=True) as (engine, _):
        done = await engine.chat(ASK, [TOOL], Sampling())

    assert done.message["tool_calls"] == [call(1), call(2, "sub", '{"a": 2}')]


async def test_a_streamed_answer_has_all_that_a_whole_one_has():
    old = {"name": "add", "arguments": '{"a": 1}'}
    whole = answer("function_call", content=None, refusal="I cannot.", function_call=old)
    events = [
        chunk({"refusal": "I can"}),
        chunk({"refusal": "not.", "function_call": {"name": "add", "arguments": '{"a": '}}),
        chunk({"function_call": {"arguments": "1}"}}),
        chunk(None, finish="function_call"),
        chunk({}, usage=USAGE),
    ]
    async with engine_on(whole) as (engine, _):
        expected = await engine.chat(ASK, [TOOL], Sampling())
    async with engine_on(events, stream=True) as (engine, _):
        done = await engine.chat(ASK, [TOOL], Sampling())
    for each in (done, expected):  # a call in the old form has no id, so that it gets one
        each.message["tool_calls"][0]["id"] = "made"
    assert done == expected


async def test_a_stream_that_names_no_finish_reason_but_counts_its_tokens_is_complete():
    events = [chunk({"content": "hello"}), chunk({}, usage=USAGE), "[DONE]"]
    async with engine_on(events, stream=True) as (engine, _):
        done = await engine.chat(ASK, [], Sampling())

    assert (done.message["content"], done.finish_reason) == ("hello", "stop")


async def test_a_stream_that_ends_in_the_middle_may_be_tried_again():
    async with engine_on([chunk({"content": "a"}, usage=None)], stream=True) as (engine, _):
        with pytest.raises(EngineUnavailable, match="middle of the answer"):
            await engine.chat(ASK, [], Sampling())


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([chunk({"content": "a"}), {"error": {"message": "overloaded", "code": 500}}], "overloaded"),
        ([chunk({"content": "a"}), "[DONE]"], "ended in the middle of the answer"),
    ],
)
async def test_a_stream_that_breaks_is_an_error(events, said):
    async with engine_on(events, stream=True) as (engine, _):
        with pytest.raises(EngineError, match=said):
            await engine.chat(ASK, [], Sampling())


@pytest.mark.parametrize("code", [429, "rate_limit_exceeded", 503])
async def test_a_stream_that_is_cut_off_by_load_may_be_tried_again(code):
    events = [chunk({"content": "a"}), {"error": {"message": "slow down", "code": code}}]
    async with engine_on(events, stream=True) as (engine, _):
        with pytest.raises(EngineUnavailable, match="slow down"):
            await engine.chat(ASK, [], Sampling())


async def test_a_connection_closed_in_mid_stream_is_an_error():
    async with engine_on([chunk({"content": "a"}), "close"], stream=True) as (engine, _):
        with pytest.raises(EngineUnavailable, match="ClientPayloadError"):
            await engine.chat(ASK, [], Sampling())


async def test_reasoning_under_its_other_name_and_the_cost_that_an_api_says_are_read():
    said = answer(reasoning="hm") | {"usage": {**USAGE, "cost": 0.25}}
    parts = [chunk({"reasoning": "h"}), chunk({"reasoning": "m", "content": "hello"}, finish="stop")]
    async with engine_on(said, price_in=2.0, price_out=4.0) as (engine, _):
        whole = await engine.chat(ASK, [], Sampling())
    async with engine_on(parts, stream=True) as (engine, _):
        streamed = await engine.chat(ASK, [], Sampling())

    assert whole.message == streamed.message
    assert whole.message["reasoning_content"] == "hm"
    assert (whole.usage.cost_usd, streamed.usage.cost_usd) == (0.25, None)


async def test_a_message_without_choices_is_read():
    async with engine_on({"message": {"role": "assistant", "content": "hello"}, "done": True}) as (engine, _):
        assert (await engine.chat(ASK, [], Sampling())).message["content"] == "hello"


async def test_a_refusal_is_the_answer():
    async with engine_on(answer(content=None, refusal="I cannot.")) as (engine, _):
        assert (await engine.chat(ASK, [], Sampling())).message["content"] == "I cannot."


async def test_a_proxy_that_answers_with_its_upstreams_error_is_understood():
    body = {"error": {"message": "upstream is full", "code": 429}}
    no_credit = {"error": {"message": "no credit", "code": 402}}
    async with engine_on(body, no_credit, retry_s=0) as (engine, _):
        with pytest.raises(EngineUnavailable, match="upstream is full"):
            await engine.chat(ASK, [], Sampling())
        with pytest.raises(EngineError, match="no credit") as caught:
            await engine.chat(ASK, [], Sampling())
    assert not isinstance(caught.value, EngineUnavailable)


class Sums(ae.ToolEnv):
    """An environment that knows nothing of who plays it."""

    def start(self) -> str:
        return "What is 1 + 2, and 3 + 4?"

    @ae.tool
    def add(self, a: int, b: int = 0) -> int:
        """Add."""
        return a + b

    def reward(self, answer: str) -> float:
        return float("3 and 7" in answer)


async def test_the_same_environment_is_played_with_parallel_calls_and_never_trained_on():
    calls = [call(1, arguments='{"a": 1, "b": 2}'), call(2, arguments='{"a": 3, "b": 4}')]
    plan = [
        refusal(429, "slow down", **{"Retry-After": "0"}),
        answer("tool_calls", content=None, tool_calls=calls),
        answer(content="3 and 7"),
    ]
    async with engine_on(*plan, price_in=2.0, price_out=4.0) as (engine, seen):
        runner = Runner(engine, None, RunLimits(max_turns=4))
        played = await runner.run_episode(Sums(), {})

    assert [(one["tool_call_id"], one["content"]) for one in seen[2]["messages"][2:]] == [
        ("c1", "3"),
        ("c2", "7"),
    ]
    assert (played.stop_reason, played.reward, len(played.turns)) == ("final_answer", 1.0, 2)
    assert (played.sequences, played.trainable) == ((), False)
    assert "no token ids" in played.untrainable_reason
    assert played.metrics["cost_usd"] == pytest.approx(80e-6)
    assert (played.metrics["prompt_tokens"], played.metrics["cached_tokens"]) == (20, 16)


async def test_a_deadline_aborts():
    async with engine_on(answer(), concurrency=1) as (engine, _):
        await engine._settle()
        async with engine._room:
            done = await engine.chat(ASK, [], Sampling(), deadline_s=0.01)

    assert (done.finish_reason, done.message["content"]) == ("abort", "")


@pytest.mark.parametrize(
    ("reply", "error", "said"),
    [
        (refusal(400, "This model's maximum context length is 9 tokens"), ContextTooLong, "context length"),
        (refusal(400, "bad"), EngineError, "refused the request: .*bad"),
        (refusal(401, "Incorrect API key"), EngineError, "401 Unauthorized: Incorrect API key"),
        (refusal(404, "no such model"), EngineError, "404 Not Found: no such model"),
        ({"nothing": 1}, EngineError, "without a choice"),
        (web.Response(text="<html>"), EngineError, "not answer with a chat completion"),
    ],
    ids=["context", "bad", "key", "model", "empty", "nonsense"],
)
async def test_a_refusal_or_nonsense_is_one_clear_error(reply, error, said):
    async with engine_on(reply) as (engine, _):
        with pytest.raises(error, match=said):
            await engine.chat(ASK, [], Sampling())


async def test_a_missing_key_and_an_adapter_are_usage_errors(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(UsageError, match="OPENAI_API_KEY"):
        OpenAIChatEngine("gpt")
    with pytest.raises(UsageError, match="adapter"):
        await OpenAIChatEngine("m", base_url="http://127.0.0.1:9").chat(ASK, [], Sampling(adapter="x"))
    with pytest.raises(UsageError, match="cannot sample by a grammar"):
        await OpenAIChatEngine("m", base_url="http://127.0.0.1:9").chat(ASK, [], Sampling(grammar="x"))


def test_the_next_event_loop_may_also_have_more_requests_than_go_at_once():
    async def several():
        async with engine_on(*[answer()] * 3, concurrency=1) as (there, _):
            engine.address = there.address
            done = await asyncio.gather(*(engine.chat(ASK, [], Sampling()) for _ in range(3)))
            await engine.close()
            return [one.finish_reason for one in done]

    engine = OpenAIChatEngine("m", base_url="http://127.0.0.1:1/v1", api_key="k", concurrency=1)

    assert [asyncio.run(several()) for _ in range(2)] == [["stop"] * 3] * 2


def test_an_engine_may_be_closed_on_another_event_loop_than_it_was_used_on():
    async def used():
        async with engine_on(answer()) as (there, _):
            engine.address = there.address
            await engine.chat(ASK, [], Sampling())
            await engine._client.close()  # or the test would leave the connection open

    async def close():
        raise RuntimeError("Event loop is closed")

    engine = OpenAIChatEngine("m", base_url="http://127.0.0.1:1/v1", api_key="k")
    asyncio.run(used())
    engine._client.close = close  # as it is with an open connection

    asyncio.run(engine.close())
    asyncio.run(engine.close())
