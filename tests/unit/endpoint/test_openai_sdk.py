"""OpenAI's SDK, plain and streaming, against the endpoint."""

from __future__ import annotations

import asyncio

import openai
import pytest

from agentenv.core import RunLimits
from agentenv.engine import Sampling, ScriptedTurn
from helpers.agents import ADD, RESPONSES, by_turn, call, check_one_sequence, results, served, tools_of
from helpers.waiting import until

TURNS = by_turn(
    "<think>I should\n  add.  </think> Let me look. \n"
    + call('{"b": 3,  "a": 2}')
    + call('{"query": "caf\\u00e9 ü</x>", "limit": 1.0}', "lookup"),
    call('{"a":5,"b":1}'),
    "\n\nIt is 6. \n",
)
LIMITS = {"query": {"type": "string"}, "limit": {"type": "number"}}
LOOKUP = {
    "type": "function",
    "function": {"name": "lookup", "parameters": {"type": "object", "properties": LIMITS}},
}
FLAT = tools_of(RESPONSES, ADD, LOOKUP)


def client(agent, **options) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{agent.url}/v1", api_key="x", **options)


async def whole(sdk, **request):
    answer = await sdk.chat.completions.create(**request)
    choice = answer.choices[0]
    return choice.message.model_dump(exclude_none=True), choice.finish_reason, answer.usage


async def streamed(sdk, **request):
    async with sdk.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        answer = await stream.get_final_completion()
    choice = answer.choices[0]
    return choice.message.model_dump(exclude_none=True), choice.finish_reason, answer.usage


async def whole_response(sdk, **request):
    return await sdk.responses.create(**request)


async def streamed_response(sdk, **request):
    async with sdk.responses.stream(**request) as stream:
        return await stream.get_final_response()


@pytest.mark.parametrize("ask", [whole_response, streamed_response])
@pytest.mark.parametrize("deltas", [False, True], ids=["all", "deltas"])
async def test_an_agent_of_the_responses_api_is_one_sequence(ask, deltas):
    async with served(TURNS) as agent, client(agent) as sdk:
        items, last = [{"role": "user", "content": "What is 2+3+1?"}], {}
        while True:
            asked = {"model": "m", "instructions": "You add.", "tools": FLAT}
            response = await ask(sdk, input=items, **asked, **last)
            told = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "5"}
                for item in response.output
                if item.type == "function_call"
            ]
            last = {"previous_response_id": response.id} if deltas else {}
            items = told if deltas else [*items, *response.output, *told]
            if not told:
                break

        captured = check_one_sequence(agent)
    assert [turn.message["role"] for turn in captured.turns] == ["assistant"] * 3
    assert captured.messages[0] == {"role": "system", "content": "You add."}
    assert response.output_text == agent.session.turns[-1].message["content"]
    assert response.usage.output_tokens == captured.turns[-1].num_tokens
    assert len(captured.turns[0].tool_results) == 2


async def test_ids_of_items_never_repeat():
    async with served(TURNS) as agent, client(agent) as sdk:
        request = {"model": "m", "input": "?", "tools": FLAT}
        both = [await whole_response(sdk, **request), await streamed_response(sdk, **request)]

    ids = [item.id for response in both for item in response.output]
    assert len(set(ids)) == len(ids) == 8


async def test_a_response_that_was_cut_is_incomplete():
    async with served(["x" * 50], sampling=Sampling(max_tokens=9)) as agent, client(agent) as sdk:
        plain = await whole_response(sdk, model="m", input="?")
        events = [event async for event in await sdk.responses.create(model="m", input="?", stream=True)]

    assert events[-1].type == "response.incomplete"
    for response in (plain, events[-1].response):
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    "request_",
    [
        {"input": "?", "previous_response_id": "resp_none"},
        {"input": "?", "conversation": "conv_1"},
        {"input": [{"type": "web_search_call", "id": "x", "status": "completed"}]},
    ],
    ids=str,
)
async def test_responses_that_cannot_be_given_are_refused(request_):
    async with served(TURNS) as agent, client(agent) as sdk:
        with pytest.raises(openai.BadRequestError):
            await sdk.responses.create(model="m", **request_)

        assert agent.engine.requests == []


async def test_tools_that_no_model_here_can_call_are_left_out_and_counted():
    async with served(TURNS) as agent, client(agent) as sdk:
        spaced = {"type": "namespace", "name": "n", "description": "", "tools": [FLAT[1]]}
        await sdk.responses.create(model="m", input="?", tools=[FLAT[0], {"type": "web_search"}, spaced])

        assert [tool["function"]["name"] for tool in agent.captured.tools] == ["add", "lookup"]
        assert agent.session.counts["ignored_tool_web_search"] == 1


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_an_agent_of_the_sdk_is_one_sequence(ask):
    async with served(TURNS) as agent, client(agent) as sdk:
        messages, reason = [{"role": "user", "content": "What is 2+3+1?"}], "tool_calls"
        while reason == "tool_calls":
            message, reason, usage = await ask(sdk, model="m", messages=messages, tools=[ADD, LOOKUP])
            messages += [message, *results(message)]

        last = check_one_sequence(agent).turns[-1]
    roles = ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in messages] == roles
    assert [made["function"]["arguments"] for made in messages[1]["tool_calls"]] == [
        '{"b": 3,  "a": 2}',
        '{"query": "caf\\u00e9 ü</x>", "limit": 1.0}',
    ]
    assert message["content"] == agent.session.turns[-1].message["content"]
    assert (usage.completion_tokens, usage.prompt_tokens) == (last.num_tokens, last.start)


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


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_a_client_that_times_out_and_asks_again_gets_the_one_sample(ask):
    gate = asyncio.Event()
    script = [ScriptedTurn(text="late", gate=gate)]
    async with served(script) as agent, client(agent, timeout=0.3, max_retries=100) as sdk:
        asking = asyncio.create_task(ask(sdk, model="m", messages=[{"role": "user", "content": "?"}]))
        await until(lambda: agent.session.counts["repeated_requests"])
        gate.set()
        message, *_ = await asking

        assert message["content"] == "late"
        assert len(agent.engine.requests) == len(agent.session.turns) == 1
        await until(lambda: agent.session.turns[0].delivered)
        assert agent.captured.left_out == {}


async def test_the_sdk_lists_the_models():
    async with served(TURNS) as agent, client(agent) as sdk:
        assert [model.id async for model in sdk.models.list()] == ["agentenv"]
        assert (await sdk.models.retrieve("other")).id == "other"
