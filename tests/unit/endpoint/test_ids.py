"""Ids have the form of each API, never repeat, and may be sent back in place of what they name."""

from __future__ import annotations

import pytest

from helpers import wire
from helpers.agents import ADD, ASK, MESSAGES, RESPONSES, body_of, by_turn, call, check_one_sequence, served

TURNS = by_turn("<think>hm</think>I look." + call('{"a": 2, "b": 3}'), "<think>so</think>It is 5.")


async def ask(agent, path, *items, status=200):
    return await agent.post(path, body_of(path, *items, tools=[ADD]), status)


async def test_calls_have_ids_in_the_form_of_each_api():
    async with served(TURNS) as agent:
        chat = await agent.chat([ASK])
        responses = await ask(agent, RESPONSES, ASK)
        messages = await ask(agent, MESSAGES, ASK)

    assert chat["tool_calls"][0]["id"].startswith("call_")
    assert next(i for i in responses["output"] if i["type"] == "function_call")["call_id"].startswith("call_")
    assert next(b for b in messages["content"] if b["type"] == "tool_use")["id"].startswith("toolu_")


async def test_two_calls_of_one_reply_never_share_an_id():
    async with served([call('{"a": 1, "b": 1}') * 2]) as agent:
        said = await agent.chat([ASK])

    assert len({made["id"] for made in said["tool_calls"]}) == 2


async def test_each_thinking_has_a_signature_of_its_own():
    async with served(TURNS) as agent:
        first = await ask(agent, MESSAGES, ASK)
        second = await ask(agent, MESSAGES, ASK)

    signatures = {said["content"][0]["signature"] for said in (first, second)}
    assert len(signatures) == 2
    assert all(signatures)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [lambda id: {"type": "item_reference", "id": id}, lambda id: {"id": id}])
async def test_items_that_were_issued_may_be_named_by_their_ids(form, stream):
    async with served(TURNS) as agent:
        body = body_of(RESPONSES, ASK, tools=[ADD], stream=stream)
        *items, result = wire.goes_on(RESPONSES, await wire.ask(agent, RESPONSES, body))
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
        await ask(agent, RESPONSES, ASK, *(form(item["id"]) for item in items), result)

        check_one_sequence(agent, 2)


async def test_an_item_that_was_never_issued_is_told():
    async with served(TURNS) as agent:
        said = await ask(agent, RESPONSES, ASK, {"type": "item_reference", "id": "msg_other"}, status=400)

    assert "msg_other" in said["error"]["message"]
