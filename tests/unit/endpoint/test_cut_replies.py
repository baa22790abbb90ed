"""A reply whose beginning alone goes on in the conversation is trained up to there, in one sequence."""

from __future__ import annotations

import pytest

from agentenv.core import Supports
from helpers.agents import TOKENIZER, by_turn, call, check_tokens, served

ASK = {"role": "user", "content": "Add 2 and 3. Write one action at a time."}
INVENTED = "Action: add(2, 3)\nObservation: 5, as I would think\nFinal: 5"
PLAN = '{"steps": ["look up the two numbers", "add them with the calculator"]}'


def observed(text="Observation: 5"):
    return {"role": "user", "content": text}


def first_action(said):
    return {"role": "assistant", "content": said["content"].split("\nObservation")[0]}


async def play(agent, turns):
    messages = [ASK]
    for _ in range(turns):
        said = await agent.chat(messages, tools=())
        messages += [first_action(said), observed()]


async def test_an_agent_that_cuts_its_reply_after_the_first_action_is_one_sequence():
    async with served(by_turn(*[INVENTED] * 3, "Final: 5")) as agent:
        await play(agent, 4)

        check_tokens(agent.session, agent.engine)
        captured = agent.captured
    kept = captured.turns[0]
    (sequence,) = captured.sequences
    assert TOKENIZER.decode(sequence.token_ids[kept.start : kept.end]) == "Action: add(2, 3)"
    assert kept.message["content"] == "Action: add(2, 3)"
    assert sequence.num_trained_tokens == sum(turn.num_tokens for turn in captured.turns)
    assert captured.left_out == {"cut": 3 * (len(INVENTED) + 1 - len("Action: add(2, 3)"))}


async def test_what_a_client_cut_off_is_gone_for_requests_with_the_whole_reply():
    async with served(by_turn(INVENTED, "Final: 5")) as agent:
        said = await agent.chat([ASK], tools=())
        await agent.chat([ASK, first_action(said), observed()], tools=())
        await agent.chat([ASK, said, observed()], tools=())

        check_tokens(agent.session, agent.engine)
        assert agent.causes == ["edited"]


async def test_a_whole_reply_that_was_used_is_not_cut_any_more():
    async with served(by_turn(INVENTED, "Final: 5")) as agent:
        said = await agent.chat([ASK], tools=())
        await agent.chat([ASK, said, observed()], tools=())
        await agent.chat([ASK, first_action(said), observed()], tools=())

        check_tokens(agent.session, agent.engine)
        assert [turn.sequence for turn in agent.captured.turns] == [0, 0, 1]
        assert agent.captured.left_out == {}


async def test_a_call_that_a_client_dropped_is_cut_off_the_text_before_it():
    async with served(by_turn("I add the numbers." + call('{"a": 2, "b": 3}'), "It is 5.")) as agent:
        said = await agent.chat([ASK])
        await agent.chat([ASK, {"role": "assistant", "content": said["content"]}, observed()])

        check_tokens(agent.session, agent.engine)
        assert [turn.sequence for turn in agent.captured.turns] == [0, 0]
        assert agent.captured.turns[0].tool_calls == ()


@pytest.mark.parametrize(
    ("plan", "task"),
    [
        (PLAN, "Work by this plan: " + PLAN),
        (PLAN, "add them with the calculator"),
        ("1. look up the two numbers\n2. add them", "Do: 1. look up the two numbers"),
    ],
    ids=["whole", "step", "line"],
)
async def test_a_plan_that_a_later_request_contains_is_trained(plan, task):
    async with served([plan, "done", "bye"]) as agent:
        await agent.chat([ASK], tools=())
        said = await agent.chat([{"role": "user", "content": task}])
        await agent.chat([{"role": "user", "content": task}, said, observed()])

        assert agent.captured.left_out == {}


async def test_a_title_that_repeats_the_question_is_not_trained():
    async with served([f"Title: {ASK['content']}", "done"]) as agent:
        await agent.chat([{"role": "user", "content": f"Give a title to:\n{ASK['content']}"}], tools=())
        await agent.chat([ASK])

        assert set(agent.captured.left_out) == {"auxiliary"}


def test_the_beginning_of_a_completion_has_what_belongs_to_its_tokens():
    from agentenv.engine import Completion

    whole = Completion((1, 2, 3), (-1.0, -2.0, -3.0), "stop", ((0, 0, 1), (1, 1, 3)))
    supported = Completion((1, 2), (-1.0, -2.0), "stop", supports=Supports.of([{1}, {2, 3}]))

    assert whole.cut(2) == Completion((1, 2), (-1.0, -2.0), "stop", ((0, 0, 1), (1, 1, 2)))
    assert supported.cut(1).supports == Supports.of([{1}])
