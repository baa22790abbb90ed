"""Anthropic's messages over plain HTTP; the SDK itself is driven where it is installed."""

from __future__ import annotations

import pytest

from agentenv.core import RunLimits
from agentenv.engine import Sampling
from helpers import wire
from helpers.agents import ADD, ASK, MESSAGES, THREE_TURNS, body_of, check_one_sequence, served
from helpers.wire import goes_on


async def ask(agent, *messages, **more):
    return await wire.ask(agent, MESSAGES, body_of(MESSAGES, *messages, tools=[ADD], **more))


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("threads", [False, True], ids=["all", "deltas"])
async def test_an_agent_of_the_messages_api_is_one_sequence(stream, threads):
    async with served(THREE_TURNS) as agent:
        messages, thread = [ASK], {}
        while True:
            said = await ask(agent, *messages, system="You add.", stream=stream, **thread)
            own, *answers = goes_on(MESSAGES, said)
            if threads:
                messages = answers
                thread = {"thread": {"type": "continue", "previous_message_id": said["id"]}}
            else:
                own["content"] = [{**one, "cache_control": {"type": "ephemeral"}} for one in own["content"]]
                messages += [own, *answers]
            if not answers:
                break

        last = check_one_sequence(agent).turns[-1]
    assert said["stop_reason"] == "end_turn"
    assert said["content"][-1]["text"] == agent.session.turns[-1].message["content"]
    usage = said["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == last.start
    assert usage["output_tokens"] == last.num_tokens


async def test_a_plain_and_a_streamed_message_say_the_same():
    async with served(THREE_TURNS) as agent:
        both = [await ask(agent, ASK, stream=stream) for stream in (False, True)]

    own = ("id", "signature")
    contents = [
        [{name: value for name, value in block.items() if name not in own} for block in message["content"]]
        for message in both
    ]
    assert contents[0] == contents[1]
    assert [block["type"] for block in contents[0]] == ["thinking", "text", "tool_use", "tool_use"]
    assert both[0]["stop_reason"] == both[1]["stop_reason"] == "tool_use"


async def test_tokens_are_counted_as_they_are_sent():
    async with served(THREE_TURNS) as agent:
        body = body_of(MESSAGES, ASK, tools=[ADD], system="You add.")
        counted = await agent.post(f"{MESSAGES}/count_tokens", body)
        await agent.post(MESSAGES, body)

        assert counted == {"input_tokens": agent.captured.turns[0].start}


async def test_results_and_texts_of_one_message_are_told_apart():
    async with served(THREE_TURNS) as agent:
        own, told = goes_on(MESSAGES, await ask(agent, ASK))
        told["content"].append({"type": "text", "text": "Go on."})
        await ask(agent, ASK, own, told)

        roles = [message["role"] for message in agent.captured.messages]
    assert roles[:5] == ["user", "assistant", "tool", "tool", "user"]


async def test_a_stop_sequence_and_a_cut_are_told():
    async with served(["one two three"]) as agent:
        stopped = await ask(agent, ASK, stop_sequences=["two"])
    async with served(["one two three"], sampling=Sampling(max_tokens=5)) as agent:
        cut = await ask(agent, ASK)

    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert cut["stop_reason"] == "max_tokens"


async def test_errors_have_anthropics_form():
    async with served(THREE_TURNS, limits=RunLimits(max_context_tokens=400, max_turns=1)) as agent:
        refused = [
            await agent.post(MESSAGES, body_of(MESSAGES, message, tools=[ADD]), status)
            for message, status in (
                ({"role": "user", "content": "x" * 600}, 400),
                (ASK, 200),
                (ASK, 400),
                ({"role": "user"}, 400),
                ({"role": "user", "content": [{"type": "document"}]}, 400),
            )
        ]

    answered = refused.pop(1)
    assert answered["type"] == "message"
    assert refused[0]["error"]["message"].startswith("prompt is too long")
    assert [error["type"] for error in refused] == ["error"] * 4
    assert {error["error"]["type"] for error in refused} == {"invalid_request_error"}
