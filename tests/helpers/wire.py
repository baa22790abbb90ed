"""Clients of the endpoint's three APIs over plain HTTP: they ask, join streams, and go on from an answer."""

from __future__ import annotations

import json
from typing import Any

from helpers.agents import CHAT, MESSAGES, RESPONSES, Served, results


async def ask(
    agent: Served, path: str, body: dict[str, Any], check: Any = lambda value, streamed: value
) -> Any:
    """Return the answer to a body as one object, whether it is streamed or not.

    Args:
        agent: the session.
        path: address of the API.
        body: the request.
        check: takes each event, or the answer, and returns it.
    """
    async with agent.http.post(agent.url + path, json=body) as got:
        text = await got.text()
        assert got.status == 200, text
    if not body.get("stream"):
        return check(json.loads(text), streamed=False)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert (events[-1] == "[DONE]") == (path == CHAT)
    said = [check(json.loads(event), streamed=True) for event in events if event != "[DONE]"]
    return check({CHAT: chat_of, RESPONSES: response_of, MESSAGES: message_of}[path](said), streamed=False)


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
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
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
            message |= {**event["delta"], "usage": event["usage"]}
    for block in message["content"]:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return message


def goes_on(path, answer):
    """The items to append to the history after an answer: itself, and a result for each call."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        return [message, *results(message)]
    if path == RESPONSES:
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        told = [{"type": "function_call_output", "call_id": made["call_id"], "output": "5"} for made in calls]
        return [*answer["output"], *told]
    used = [block for block in answer["content"] if block["type"] == "tool_use"]
    told = [{"type": "tool_result", "tool_use_id": made["id"], "content": "5"} for made in used]
    rest = [{"role": "user", "content": told}] if told else []
    return [{"role": "assistant", "content": answer["content"]}, *rest]
