"""OpenAI's SDK, plain and streaming, against the endpoint."""

from __future__ import annotations

import openai
import pytest

from agentenv.core import RunLimits
from helpers.agents import ADD, by_turn, call, check_tokens, served

TURNS = by_turn(
    "<think>I should\n  add.  </think> Let me look. \n"
    + call('{"b": 3,  "a": 2}')
    + call('{"query": "caf\\u00e9 ü</x>", "limit": 1.0}', "lookup"),
    call('{"a":5,"b":1}'),
    "\n\nIt is 6. \n",
)
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "number"}},
        },
    },
}


def client(agent, **options) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{agent.url}/v1", api_key="x", **options)


async def whole(sdk, **request):
    answer = await sdk.chat.completions.create(**request)
    return (
        answer.choices[0].message.model_dump(exclude_none=True),
        answer.choices[0].finish_reason,
        answer.usage,
    )


async def streamed(sdk, **request):
    async with sdk.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    message = answer.choices[0].message.model_dump(exclude_none=True)
    return message, answer.choices[0].finish_reason, answer.usage


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_an_agent_of_the_sdk_is_one_sequence(ask):
    async with served(TURNS) as agent, client(agent) as sdk:
        messages = [{"role": "user", "content": "What is 2+3+1?"}]
        while True:
            message, reason, usage = await ask(sdk, model="m", messages=messages, tools=[ADD, LOOKUP])
            messages.append(message)
            if reason != "tool_calls":
                break
            messages += [
                {"role": "tool", "tool_call_id": made["id"], "content": "5"} for made in message["tool_calls"]
            ]

        captured = agent.captured
        check_tokens(agent.session, agent.engine)
    assert [turn.sequence for turn in captured.turns] == [0, 0, 0]
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [made["function"]["arguments"] for made in messages[1]["tool_calls"]] == [
        '{"b": 3,  "a": 2}',
        '{"query": "caf\\u00e9 ü</x>", "limit": 1.0}',
    ]
    assert message["content"] == agent.session.turns[-1].message["content"]
    assert usage.completion_tokens == captured.turns[-1].num_tokens
    assert usage.prompt_tokens == captured.turns[-1].start
    assert captured.left_out == {}


async def test_plain_and_streamed_answers_say_the_same():
    request = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": [ADD, LOOKUP]}
    async with served(TURNS) as agent, client(agent) as sdk:
        plain, *_ = await whole(sdk, **request)
        stream, *_ = await streamed(sdk, **request)

    def said(message):
        calls = [(made["function"]["name"], made["function"]["arguments"]) for made in message["tool_calls"]]
        return message["content"], message["reasoning_content"], calls

    assert said(plain) == said(stream)


async def test_the_sdk_does_not_repeat_what_a_limit_refused():
    async with served(TURNS, limits=RunLimits(max_turns=1)) as agent, client(agent, max_retries=3) as sdk:
        await whole(sdk, model="m", messages=[{"role": "user", "content": "?"}])
        with pytest.raises(openai.BadRequestError) as refused:
            await whole(sdk, model="m", messages=[{"role": "user", "content": "more"}])

        assert refused.value.code == "episode_over"


async def test_the_sdk_lists_the_models():
    async with served(TURNS) as agent, client(agent) as sdk:
        assert [model.id async for model in sdk.models.list()] == ["agentenv"]
        assert (await sdk.models.retrieve("other")).id == "other"
