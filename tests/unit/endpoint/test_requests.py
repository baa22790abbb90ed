"""What a request asks for is followed, or refused with the reason."""

from __future__ import annotations

import base64

import openai
import pytest

import agentenv as ae
from agentenv.core.images import hash_of
from agentenv.engine import ScriptedEngine
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner
from helpers.agents import (
    ADD,
    ASK,
    CHAT,
    MESSAGES,
    RESPONSES,
    body_of,
    by_turn,
    call,
    check_one_sequence,
    results,
    served,
)
from helpers.seeing import png

TURNS = by_turn(call('{"a": 2, "b": 3}'), "It is 5.", "Bye.")
PATHS = pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])


@PATHS
async def test_a_call_against_tool_choice_none_is_not_sent_and_counted(path):
    choice = {"type": "none"} if path == MESSAGES else "none"
    async with served(["So." + call('{"a": 2, "b": 3}')]) as agent:
        said = await agent.post(path, body_of(path, ASK, tools=[ADD], tool_choice=choice))

        assert "add" not in str(said.get("choices") or said.get("output") or said["content"])
        assert agent.session.counts["calls_against_tool_choice"] == 1
        assert agent.captured.turns[0].tool_calls == ()


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "apart"])
async def test_the_model_goes_on_from_a_last_message_of_the_assistant(merged):
    begun = {"role": "assistant", "content": "It is"}
    async with served([" 5.", "Bye."]) as agent:
        said = await agent.chat([ASK, begun])
        whole = [{**begun, "content": "It is 5."}] if merged else [begun, said]
        await agent.chat([ASK, *whole, {"role": "user", "content": "Thanks."}])

        check_one_sequence(agent, 2)
    assert agent.engine.requests[0].prompt_text.endswith("<|im_start|>assistant\nIt is")
    assert said["content"] == " 5."


async def test_calls_that_nothing_answers_are_told():
    async with served(TURNS) as agent:
        said = await agent.chat([ASK])
        error = await agent.chat([ASK, said], status=400)

        assert "result of each call" in error["message"]
        assert len(agent.engine.requests) == 1


@pytest.mark.parametrize("limit", ["5", -1, 0, True, 1.5, [5]], ids=repr)
@PATHS
async def test_a_token_limit_that_is_no_count_is_refused(path, limit):
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    async with served(["ok"]) as agent:
        said = await agent.post(path, body_of(path, ASK, **{name: limit}), 400)

        assert name in said["error"]["message"]
        assert agent.engine.requests == []


@pytest.mark.parametrize("base", ["", "/v1", "/v1/v1"])
async def test_a_base_url_may_lack_its_version_or_have_it_twice(base):
    async with served(["ok"]) as agent:
        for path in (CHAT, RESPONSES, MESSAGES):
            await agent.post(base + path.removeprefix("/v1"), body_of(path, ASK))

        assert len(agent.session.turns) == 3


@pytest.mark.parametrize(
    ("path", "headers"), [("/v1/embeddings", {}), ("/v1/message", {"anthropic-version": "2023-06-01"})]
)
async def test_an_address_that_is_not_served_says_what_is(path, headers):
    async with (
        served(["ok"]) as agent,
        agent.http.post(f"{agent.url}{path}", json={"input": "x"}, headers=headers) as got,
    ):
        said = await got.json()

    assert got.status == 404
    assert "/chat/completions" in said["error"]["message"]
    assert ("type" in said) == bool(headers), "each API has its own form of errors"


async def test_the_model_is_shown_the_tools_that_anthropics_clients_run():
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    async with served([call('{"command": "ls"}', "bash")]) as agent:
        body = {"messages": [ASK], "max_tokens": 500, "tools": tools}
        said = await agent.post(MESSAGES, body)

        prompt = agent.engine.requests[0].prompt_text
        assert said["content"][0]["input"] == {"command": "ls"}
        assert "bash session" in prompt
        assert "str_replace_based_edit_tool" in prompt
        assert agent.session.counts["ignored_tool_web_search_20250305"] == 1


async def test_only_the_first_call_is_sent_where_the_client_takes_one():
    twice = call('{"a": 2, "b": 3}') + call('{"a": 3, "b": 3}')
    async with served(by_turn(twice, "It is 5.")) as agent:
        said = await agent.chat([ASK], parallel_tool_calls=False)
        await agent.chat([ASK, said, *results(said)], parallel_tool_calls=False)

        assert len(said["tool_calls"]) == 1
        assert agent.session.counts["calls_against_parallel_tool_calls"] == 1
        check_one_sequence(agent, 2)


# Images that an agent with its own loop sends: by content, as data URLs only, at their places in the tokens


FIRST, SECOND = png(1, 40, 30), png(2, 40, 30)


def shown(data):
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


class Looks(ae.AgentEnv):
    async def agent(self, url, task):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as sdk:
            said = [shown(FIRST)]
            for following in (shown(SECOND), None):
                answer = await sdk.chat.completions.create(model="m", messages=said)
                said += [{"role": "assistant", "content": answer.choices[0].message.content}]
                said += [following] if following else []
            # The same words after another picture of the same size are another conversation.
            other = [shown(SECOND), *said[1:]]
            await sdk.chat.completions.create(model="m", messages=other[:3])
            link = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
            with pytest.raises(openai.APIStatusError, match="is no data URL"):
                await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": [link]}])
            return "done"

    def reward(self, answer):
        return 1.0


async def test_an_agents_images_stand_at_their_places_and_are_never_taken_for_each_other():
    codec = byte_tokenizer()
    engine = ScriptedEngine(["one", "two", "three", "four"], tokenizer=codec)
    record = await Runner(engine, Renderer(codec), ae.RunLimits()).run_episode(Looks(), {})

    assert record.error is None, record.error
    seen = [[image.sha256 for image in sequence.images] for sequence in record.sequences]
    first, second = hash_of(FIRST), hash_of(SECOND)
    assert [first, second] in seen
    assert [second, second] in seen
    for sequence in record.sequences:
        for image in sequence.images:
            ids = sequence.token_ids[image.offset : image.end]
            assert tuple(ids) == codec.images.prepare(40, 30).ids


async def test_tool_choice_none_keeps_the_conversation_one_sequence():
    async with served(TURNS) as agent:
        said = await agent.chat([ASK])
        await agent.chat([ASK, said, *results(said)], tool_choice="none")

        check_one_sequence(agent, 2)
        assert "Add two numbers" in agent.engine.requests[1].prompt_text
