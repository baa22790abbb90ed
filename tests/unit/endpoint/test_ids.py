"""Ids have the form of each API, never repeat, and may be sent back in place of what they name."""

from __future__ import annotations

import pytest

from helpers.agents import ADD, by_turn, call, check_tokens, served

ASK = {"role": "user", "content": "What is 2+3?"}
TURNS = by_turn("<think>hm</think>I look." + call('{"a": 2, "b": 3}'), "<think>so</think>It is 5.")
TOOL = {"type": "function", **ADD["function"]}
ANTHROPIC_TOOL = {"name": "add", "input_schema": ADD["function"]["parameters"]}


async def post(agent, path, body, status=200):
    async with agent.http.post(f"{agent.url}{path}", json={"model": "m", **body}) as got:
        said = await got.json()
        assert got.status == status, said
    return said


def messages_body(*messages):
    return {"max_tokens": 2000, "tools": [ANTHROPIC_TOOL], "messages": list(messages)}


async def test_calls_have_ids_in_the_form_of_each_api():
    async with served(TURNS) as agent:
        chat = await agent.chat([ASK])
        responses = await post(agent, "/v1/responses", {"input": [ASK], "tools": [TOOL]})
        messages = await post(agent, "/v1/messages", messages_body(ASK))

    assert chat["tool_calls"][0]["id"].startswith("call_")
    assert next(i for i in responses["output"] if i["type"] == "function_call")["call_id"].startswith("call_")
    assert next(b for b in messages["content"] if b["type"] == "tool_use")["id"].startswith("toolu_")


async def test_two_calls_of_one_reply_never_share_an_id():
    async with served([call('{"a": 1, "b": 1}') * 2]) as agent:
        said = await agent.chat([ASK])

    assert len({made["id"] for made in said["tool_calls"]}) == 2


async def test_each_thinking_has_a_signature_of_its_own():
    async with served(TURNS) as agent:
        first = await post(agent, "/v1/messages", messages_body(ASK))
        second = await post(agent, "/v1/messages", messages_body(ASK))

    signatures = {said["content"][0]["signature"] for said in (first, second)}
    assert len(signatures) == 2
    assert all(signatures)


@pytest.mark.parametrize("form", [lambda id: {"type": "item_reference", "id": id}, lambda id: {"id": id}])
async def test_items_that_were_issued_may_be_named_by_their_ids(form):
    async with served(TURNS) as agent:
        said = await post(agent, "/v1/responses", {"input": [ASK], "tools": [TOOL]})
        named = [form(item["id"]) for item in said["output"]]
        made = next(item for item in said["output"] if item["type"] == "function_call")
        result = {"type": "function_call_output", "call_id": made["call_id"], "output": "5"}
        await post(agent, "/v1/responses", {"input": [ASK, *named, result], "tools": [TOOL]})

        check_tokens(agent.session, agent.engine)
        assert [turn.sequence for turn in agent.captured.turns] == [0, 0]


async def test_streamed_items_may_be_named_by_their_ids():
    async with served(TURNS) as agent:
        body = {"model": "m", "input": [ASK], "tools": [TOOL], "stream": True}
        async with agent.http.post(f"{agent.url}/v1/responses", json=body) as got:
            text = await got.text()
        ids = dict.fromkeys(part.split('"')[0] for part in text.split('"item": {"type": "')[1:])
        assert set(ids) == {"reasoning", "message", "function_call"}
        named = dict.fromkeys(part.split('"')[0] for part in text.split('"item_id": "')[1:])
        made = text.split('"call_id": "')[1].split('"')[0]
        items = [{"type": "item_reference", "id": id} for id in named]
        result = {"type": "function_call_output", "call_id": made, "output": "5"}
        await post(agent, "/v1/responses", {"input": [ASK, *items, result], "tools": [TOOL]})

        assert [turn.sequence for turn in agent.captured.turns] == [0, 0]


async def test_an_item_that_was_never_issued_is_told():
    async with served(TURNS) as agent:
        body = {"input": [ASK, {"type": "item_reference", "id": "msg_other"}]}
        said = await post(agent, "/v1/responses", body, 400)

    assert "msg_other" in said["error"]["message"]
