"""What a request asks for is followed, or refused with the reason."""

from __future__ import annotations

import pytest

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
