"""What a request asks for is followed, or refused with the reason."""

from __future__ import annotations

import pytest

from helpers.agents import ADD, by_turn, call, check_tokens, served

ASK = {"role": "user", "content": "What is 2+3?"}
LOOKUP = {"type": "function", "function": {"name": "lookup", "description": "Look up.", "parameters": {}}}
TURNS = by_turn(call('{"a": 2, "b": 3}'), "It is 5.", "Bye.")


async def post(agent, path, body, status=200):
    async with agent.http.post(f"{agent.url}{path}", json={"model": "m", **body}) as got:
        said = await got.json()
        assert got.status == status, said
    return said


def answered(said):
    return [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "5"}]


async def test_tool_choice_none_keeps_the_conversation_one_sequence():
    async with served(TURNS) as agent:
        said = await agent.chat([ASK])
        await agent.chat([ASK, *answered(said)], tool_choice="none")

        check_tokens(agent.session, agent.engine)
        assert [turn.sequence for turn in agent.captured.turns] == [0, 0]
        assert "Add two numbers" in agent.engine.requests[1].prompt_text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_call_against_tool_choice_none_is_not_sent_and_counted(path):
    bodies = {
        "/v1/chat/completions": {"messages": [ASK], "tools": [ADD], "tool_choice": "none"},
        "/v1/responses": {
            "input": [ASK],
            "tools": [{"type": "function", **ADD["function"]}],
            "tool_choice": "none",
        },
        "/v1/messages": {
            "messages": [ASK],
            "max_tokens": 500,
            "tools": [{"name": "add", "input_schema": {}}],
            "tool_choice": {"type": "none"},
        },
    }
    async with served(["So." + call('{"a": 2, "b": 3}')]) as agent:
        said = await post(agent, path, bodies[path])

        assert "add" not in str(said.get("choices") or said.get("output") or said["content"])
        assert agent.session.counts["calls_against_tool_choice"] == 1
        assert agent.captured.turns[0].tool_calls == ()


async def test_tools_in_another_order_are_the_same_tools():
    async with served(TURNS) as agent:
        said = await agent.chat([ASK], tools=[ADD, LOOKUP])
        await agent.chat([ASK, *answered(said)], tools=[LOOKUP, ADD])

        check_tokens(agent.session, agent.engine)
        assert [turn.sequence for turn in agent.captured.turns] == [0, 0]


@pytest.mark.parametrize(
    ("system", "tools", "cause"),
    [("You add.", [ADD, LOOKUP], "tools"), ("You subtract.", [ADD], "system"), ("You end.", [], "system")],
)
async def test_a_split_says_what_the_client_changed(system, tools, cause):
    def told(text):
        return {"role": "system", "content": text}

    async with served(TURNS) as agent:
        said = await agent.chat([told("You add."), ASK])
        await agent.chat([told(system), ASK, *answered(said)], tools=tools)

        assert [rewrite.cause for rewrite in agent.captured.rewrites] == [cause]


async def test_a_changed_message_of_the_user_is_an_edit():
    async with served(TURNS) as agent:
        said = await agent.chat([ASK])
        await agent.chat([{"role": "user", "content": "What is 2+4?"}, *answered(said)])

        assert [rewrite.cause for rewrite in agent.captured.rewrites] == ["edited"]


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "apart"])
async def test_the_model_goes_on_from_a_last_message_of_the_assistant(merged):
    begun = {"role": "assistant", "content": "It is"}
    async with served([" 5.", "Bye."]) as agent:
        said = await agent.chat([ASK, begun])
        whole = [{**begun, "content": "It is 5."}] if merged else [begun, said]
        await agent.chat([ASK, *whole, {"role": "user", "content": "Thanks."}])

        check_tokens(agent.session, agent.engine)
        captured = agent.captured
    assert agent.engine.requests[0].prompt_text.endswith("<|im_start|>assistant\nIt is")
    assert said["content"] == " 5."
    assert [turn.sequence for turn in captured.turns] == [0, 0]


async def test_calls_that_nothing_answers_are_told():
    async with served(TURNS) as agent:
        said = await agent.chat([ASK])
        error = await agent.chat([ASK, said], status=400)

        assert "result of each call" in error["message"]
        assert len(agent.engine.requests) == 1


BODIES = {
    "/v1/chat/completions": ("max_tokens", {"messages": [ASK]}),
    "/v1/responses": ("max_output_tokens", {"input": [ASK]}),
    "/v1/messages": ("max_tokens", {"messages": [ASK]}),
}


@pytest.mark.parametrize("limit", ["5", -1, 0, True, 1.5, [5]], ids=repr)
@pytest.mark.parametrize("path", BODIES)
async def test_a_token_limit_that_is_no_count_is_refused(path, limit):
    name, body = BODIES[path]
    async with served(["ok"]) as agent:
        said = await post(agent, path, {**body, name: limit}, 400)

        assert name in said["error"]["message"]
        assert agent.engine.requests == []


@pytest.mark.parametrize("base", ["", "/v1", "/v1/v1"])
async def test_a_base_url_may_lack_its_version_or_have_it_twice(base):
    async with served(["ok"]) as agent:
        for path, (_, body) in BODIES.items():
            await post(agent, base + path.removeprefix("/v1"), {"max_tokens": 5, **body})

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
        said = await post(agent, "/v1/messages", body)

        prompt = agent.engine.requests[0].prompt_text
        assert said["content"][0]["input"] == {"command": "ls"}
        assert "bash session" in prompt
        assert "str_replace_based_edit_tool" in prompt
        assert agent.session.counts["ignored_tool_web_search_20250305"] == 1


async def test_only_the_first_call_is_sent_where_the_client_takes_one():
    twice = call('{"a": 2, "b": 3}') + call('{"a": 3, "b": 3}')
    async with served(by_turn(twice, "It is 5.")) as agent:
        said = await agent.chat([ASK], parallel_tool_calls=False)
        await agent.chat([ASK, *answered(said)], parallel_tool_calls=False)

        assert len(said["tool_calls"]) == 1
        assert agent.session.counts["calls_against_parallel_tool_calls"] == 1
        check_tokens(agent.session, agent.engine)
        assert [turn.sequence for turn in agent.captured.turns] == [0, 0]
