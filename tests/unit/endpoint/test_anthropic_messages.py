"""Anthropic's messages over plain HTTP; the SDK itself is driven where it is installed."""

from __future__ import annotations

import json

import pytest

from agentenv.core import RunLimits
from agentenv.engine import Sampling
from helpers.agents import ADD, by_turn, call, check_tokens, served

TURNS = by_turn(
    "<think>hm\n</think> Let me look. \n" + call('{"b": 3,  "a": 2}') + call('{"a": 1.0, "b": 2}'),
    call('{"a": 5, "b": 1}'),
    "\n\nIt is 6. \n",
)
TOOL = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": ADD["function"]["parameters"],
}
ASK = {"role": "user", "content": "What is 2+3+1?"}


async def ask(agent, messages, *, status=200, path="", **more):
    body = {"model": "m", "max_tokens": 500, "messages": messages, "tools": [TOOL], **more}
    async with agent.http.post(f"{agent.url}/v1/messages{path}", json=body) as got:
        assert got.status == status, await got.text()
        if body.get("stream"):
            return read_stream(await got.text())
        return await got.json()


def read_stream(text):
    """Put a message together as Anthropic's SDK does."""
    events = [json.loads(part.split("data: ", 1)[1]) for part in text.strip().split("\n\n")]
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    message, partial = events[0]["message"], {}
    for event in events[1:]:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            kind = delta.pop("type")
            if kind == "input_json_delta":
                partial[event["index"]] = partial.get(event["index"], "") + delta["partial_json"]
                block["input"] = (
                    json.loads(partial[event["index"]]) if partial[event["index"]].endswith("}") else {}
                )
            else:
                for name, value in delta.items():
                    block[name] += value
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    return message


def results(message):
    used = [block for block in message["content"] if block["type"] == "tool_use"]
    said = [{"type": "tool_result", "tool_use_id": block["id"], "content": "5"} for block in used]
    return [{"role": "user", "content": said}] if said else []


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("threads", [False, True], ids=["all", "deltas"])
async def test_an_agent_of_the_messages_api_is_one_sequence(stream, threads):
    async with served(TURNS) as agent:
        messages, thread = [ASK], {}
        while True:
            said = await ask(agent, messages, system="You add.", stream=stream, **thread)
            answers = results(said)
            if threads:
                messages, thread = (
                    answers,
                    {"thread": {"type": "continue", "previous_message_id": said["id"]}},
                )
            else:
                cached = [{**block, "cache_control": {"type": "ephemeral"}} for block in said["content"]]
                messages = [*messages, {"role": "assistant", "content": cached}, *answers]
            if not answers:
                break

        captured = agent.captured
        check_tokens(agent.session, agent.engine)
    assert [turn.sequence for turn in captured.turns] == [0, 0, 0]
    assert said["stop_reason"] == "end_turn"
    assert said["content"][-1]["text"] == agent.session.turns[-1].message["content"]
    usage = said["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == captured.turns[-1].start
    assert usage["output_tokens"] == captured.turns[-1].num_tokens


async def test_a_plain_and_a_streamed_message_say_the_same():
    async with served(TURNS) as agent:
        both = [await ask(agent, [ASK], stream=stream) for stream in (False, True)]

    contents = [
        [
            {name: value for name, value in block.items() if name not in ("id", "signature")}
            for block in message["content"]
        ]
        for message in both
    ]
    assert contents[0] == contents[1]
    assert [block["type"] for block in contents[0]] == ["thinking", "text", "tool_use", "tool_use"]
    assert both[0]["stop_reason"] == both[1]["stop_reason"] == "tool_use"


async def test_tokens_are_counted_as_they_are_sent():
    async with served(TURNS) as agent:
        counted = await ask(agent, [ASK], path="/count_tokens", system="You add.")
        await ask(agent, [ASK], system="You add.")

        assert counted == {"input_tokens": agent.captured.turns[0].start}


async def test_results_and_texts_of_one_message_are_told_apart():
    async with served(TURNS) as agent:
        said = await ask(agent, [ASK])
        (told,) = results(said)
        told["content"].append({"type": "text", "text": "Go on."})
        await ask(agent, [ASK, {"role": "assistant", "content": said["content"]}, told])

        roles = [message["role"] for message in agent.captured.messages]
    assert roles[:5] == ["user", "assistant", "tool", "tool", "user"]


async def test_a_stop_sequence_and_a_cut_are_told():
    async with served(["one two three"]) as agent:
        stopped = await ask(agent, [ASK], stop_sequences=["two"])
    async with served(["one two three"], sampling=Sampling(max_tokens=5)) as agent:
        cut = await ask(agent, [ASK])

    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert cut["stop_reason"] == "max_tokens"


async def test_errors_have_anthropics_form():
    async with served(TURNS, limits=RunLimits(max_context_tokens=400, max_turns=1)) as agent:
        long = await ask(agent, [{"role": "user", "content": "x" * 600}], status=400)
        await ask(agent, [ASK])
        over = await ask(agent, [ASK], status=400)
        wrong = await ask(agent, [{"role": "user"}], status=400)
        image = await ask(agent, [{"role": "user", "content": [{"type": "document"}]}], status=400)

    assert long["error"]["message"].startswith("prompt is too long")
    assert [error["type"] for error in (long, over, wrong, image)] == ["error"] * 4
    assert {error["error"]["type"] for error in (long, over, wrong, image)} == {"invalid_request_error"}
