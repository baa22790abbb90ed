"""Random conversations over the three APIs: what is sent is what the SDKs' own types say, and one sequence."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest
from pydantic import TypeAdapter

from helpers.agents import ADD, by_turn, call, check_tokens, served

openai_chat = pytest.importorskip("openai.types.chat")
openai_responses = pytest.importorskip("openai.types.responses")
anthropic_types = pytest.importorskip("anthropic.types")

pytestmark = pytest.mark.slow

TEXTS = ["", " Let me look. \n", "é ü 日本 🙂", "a </x> <b> {", "```json\n{}\n```", "x" * 130]
THOUGHTS = ["", "hm", "I should\n  use tools.  ", "y" * 99]
ARGUMENTS = ['{"a": 1, "b": 2}', '{"b": 3,  "a": 2}', '{"a":1.0,"b":-2}', "{}", '{"a": "é\\n", "b": null}']
KINDS = {
    "chat": (openai_chat.ChatCompletion, openai_chat.ChatCompletionChunk),
    "responses": (openai_responses.Response, openai_responses.ResponseStreamEvent),
    "messages": (anthropic_types.Message, anthropic_types.RawMessageStreamEvent),
}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def reply(draw, *, last):
    thought, text = draw.choice(THOUGHTS), draw.choice(TEXTS)
    calls = "" if last else "".join(call(draw.choice(ARGUMENTS)) for _ in range(draw.randint(1, 3)))
    return (f"<think>{thought}</think>" if thought else "") + text + calls


adapter_of = cache(TypeAdapter)
"""Making an adapter for the events of a response takes seconds."""


def strictly(kind, value):
    """The value, if the type takes it: every required field is there and has its type."""
    adapter_of(kind).validate_json(json.dumps(value))
    return value


def body_of(api, history):
    function = ADD["function"]
    if api == "chat":
        return {"messages": history, "tools": [ADD], "stream_options": {"include_usage": True}}
    if api == "responses":
        return {"input": history, "tools": [{"type": "function", **function}]}
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    return {"messages": history, "tools": [tool], "max_tokens": 5000}


async def ask(agent, api, history, stream):
    """Ask, check all that is sent against the SDK's types, and return the answer as one object."""
    whole, event_kind = KINDS[api]
    body = {"model": "m", **body_of(api, history)}
    if not stream:
        body.pop("stream_options", None)
    async with agent.http.post(agent.url + PATHS[api], json={**body, "stream": stream}) as got:
        text = await got.text()
        assert got.status == 200, text
    if not stream:
        return strictly(whole, json.loads(text))
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert (events[-1] == "[DONE]") == (api == "chat")
    events = [strictly(event_kind, json.loads(event)) for event in events if event != "[DONE]"]
    return strictly(whole, {"chat": chat_of, "responses": response_of, "messages": message_of}[api](events))


def chat_of(chunks):
    message = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls, reason = {}, None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for part in delta.get("tool_calls", ()):
                if part["index"] not in calls:
                    calls[part["index"]] = {name: part[name] for name in ("id", "type", "function")}
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = list(calls.values())
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    return {**chunks[0], "object": "chat.completion", "choices": [choice], "usage": chunks[-1]["usage"]}


def response_of(events):
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events[-1]["response"]


def message_of(events):
    message = events[0]["message"]
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    block[name] += delta[name]
            block["json"] += delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            message |= event["delta"]
    for block in message["content"]:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return message


def goes_on(api, answer):
    """The items to append to the history after an answer: itself, and a result for each call."""
    if api == "chat":
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls", ())
        return [message, *({"role": "tool", "tool_call_id": made["id"], "content": "5"} for made in calls)]
    if api == "responses":
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": made["call_id"], "output": "5"} for made in calls
        ]
        return [*answer["output"], *results]
    used = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": made["id"], "content": "5"} for made in used]
    rest = [{"role": "user", "content": results}] if results else []
    return [{"role": "assistant", "content": answer["content"]}, *rest]


@pytest.mark.parametrize("api", KINDS)
@pytest.mark.parametrize("seed", range(40))
async def test_a_random_conversation_is_valid_and_one_sequence(api, seed):
    draw = random.Random(f"{api}/{seed}")
    size = draw.randint(1, 5)
    replies = [reply(draw, last=turn == size - 1) for turn in range(size)]
    history = [{"role": "user", "content": "What is 2+3?"}]
    async with served(by_turn(*replies)) as agent:
        for _ in range(size):
            history += goes_on(api, await ask(agent, api, history, draw.random() < 0.5))

        check_tokens(agent.session, agent.engine)
        assert {turn.sequence for turn in agent.captured.turns} == {0}
        assert len(agent.captured.turns) == size
        assert agent.captured.left_out == {}
