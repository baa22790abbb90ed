"""Tool calls: every call gets exactly one answer, in order, and a broken one is told to the model."""

from __future__ import annotations

import asyncio
import json

import pytest

from agentenv.core import Trajectory
from agentenv.testing import tool_call
from agentenv.tools import tool
from agentenv_bridges import to_sft
from helpers.waiting import until
from scenes import RENDERER, TOKENIZER, Chat, Tools, play


class Paced(Tools):
    def start(self) -> str:
        self.both_slow = asyncio.Barrier(2)
        return super().start()

    @tool
    async def slow(self, text: str) -> str:
        "Answer after the other slow call has begun and the fast one has answered."
        await self.both_slow.wait()
        await until(lambda: 1 in self.ran)
        return f"slow {text}"


def doubles(*numbers: object) -> str:
    return "".join(tool_call("double", number=number) for number in numbers)


def tool_messages(record: Trajectory) -> list:
    return [message for message in record.messages if message["role"] == "tool"]


def kinds(record: Trajectory, turn: int = 0) -> list[str | None]:
    return [result.error_kind for result in record.turns[turn].tool_results]


async def test_parallel_calls_are_answered_in_call_order_with_their_ids():
    broken = '<tool_call>{"name": "double", "arguments": {"number": 1}</tool_call>'
    turn = [
        tool_call("slow", text="a"),
        doubles(1),
        tool_call("nothing"),
        broken,
        tool_call("slow", text="b"),
    ]

    record = await play(Paced(), ["".join(turn), "done"])

    calls, results = record.turns[0].tool_calls, record.turns[0].tool_results
    assert [one.tool_call_id for one in results] == [one.id for one in calls]
    assert len({one.id for one in calls}) == 5
    assert [results[place].text for place in (0, 1, 4)] == ["slow a", "2", "slow b"]
    assert kinds(record) == [None, None, "unknown_tool", "invalid_json", None]
    assert [one["tool_call_id"] for one in tool_messages(record)] == [one.id for one in calls]
    assert (record.metrics["tool_calls"], record.stop_reason) == (3, "final_answer")


@pytest.mark.parametrize("body", ["[1]", "5", "null", '{"name":["f"]}', '{"arguments":{}}', "not json", ""])
async def test_a_malformed_call_is_told_to_the_model_and_the_episode_goes_on(body):
    record = await play(Tools(), [f"<tool_call>{body}</tool_call>", "sorry"])

    (message,) = tool_messages(record)
    assert (record.stop_reason, record.answer, record.metrics["parse_errors"]) == ("final_answer", "sorry", 1)
    assert message["content"]
    assert record.turns[0].tool_results[0].is_error
    assert message["content"] in RENDERER.decode(record.sequences[0].token_ids)


async def test_a_malformed_call_is_kept_as_it_was_written_and_is_no_part_of_the_answer():
    broken = "<tool_call>[42]</tool_call>"

    record = await play(Tools(), [f"So: {broken}", broken], max_turns=2)

    said = [message["content"] for message in record.messages if message["role"] == "assistant"]
    assert said == [f"So:\n{broken}", broken]
    assert (record.stop_reason, record.answer) == ("max_turns", "")


async def test_rows_for_fine_tuning_have_the_malformed_call_and_no_result_without_a_call():
    broken = "<tool_call>[1]</tool_call>"
    record = await play(Tools(), [doubles(1) + broken, "done"])

    (row,) = to_sft([record], min_reward=0.0)

    messages = row["messages"]
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "user", "assistant"]
    assert messages[1]["content"] == broken
    assert [call["id"] for call in messages[1]["tool_calls"]] == [messages[2]["tool_call_id"]]


async def test_the_message_names_the_problem_and_errors_are_limited():
    broken = '<tool_call>{"name":"double","arguments":{"number":1}</tool_call>'

    record = await play(Tools(), broken, max_parse_errors=2, max_turns=30)

    assert (record.stop_reason, record.truncated) == ("max_parse_errors", True)
    assert len(record.turns) == record.metrics["parse_errors"] == len(tool_messages(record)) == 3
    assert "JSON" in tool_messages(record)[0]["content"]
    assert record.sequences[0].loss_mask[-1], "what no one reads has no tokens"


async def test_calls_in_thinking_and_other_formats_are_not_executed():
    env = Tools()
    text = f"<think>{doubles(1)}</think>Action: double[1] <config><name>double</name></config>"

    record = await play(env, [text])

    assert (env.ran, record.stop_reason, tool_messages(record)) == ([], "final_answer", [])


@pytest.mark.parametrize(
    ("turns", "limits", "ran", "ended", "told"),
    [
        ([3], {"max_tool_calls": 1}, [1], "max_tool_calls", "limit of 1"),
        ([3, 1], {"max_tool_calls_per_turn": 2}, [2, 1], "final_answer", "at most 2"),
        # What is over the limit of a turn does not use up that of the episode.
        ([3, 3], {"max_tool_calls_per_turn": 2, "max_tool_calls": 4}, [2, 2], "final_answer", "at most 2"),
        ([3, 3], {"max_tool_calls_per_turn": 2, "max_tool_calls": 3}, [2, 1], "max_tool_calls", "at most 2"),
        # Calls that use the limit up exactly do not end the episode.
        ([2], {"max_tool_calls": 2}, [2], "final_answer", ""),
        ([1], {"max_tool_calls": 0}, [0], "max_tool_calls", "limit of 0"),
    ],
)
async def test_calls_over_a_limit_are_answered_and_not_run(turns, limits, ran, ended, told):
    env = Tools()

    record = await play(env, [*(doubles(*range(count)) for count in turns), "done"], **limits)

    allowed = [[None] * run + ["not_run"] * (count - run) for count, run in zip(turns, ran, strict=True)]
    assert [kinds(record, turn) for turn in range(len(turns))] == allowed
    assert len(env.ran) == sum(ran)
    assert len(tool_messages(record)) == sum(turns)
    assert (record.stop_reason, record.truncated) == (ended, ended != "final_answer")
    assert told in record.turns[0].tool_results[-1].text


async def test_a_closing_turn_is_not_taken_for_text_when_only_broken_calls_stand_in_it():
    seen = []

    class Stepping(Tools):
        async def step(self, action):
            left = (self.context.turn, self.context.tool_calls_left)
            seen.append((len(action.get("tool_calls", ())), left))
            return await super().step(action)

    broken = "thinking aloud <tool_call>[1]</tool_call>"
    await play(Stepping(), [broken, doubles(1, 2), doubles(3), "done"], max_tool_calls=4)

    assert seen == [(2, (1, 4)), (1, (2, 2)), (0, (3, 1))], (
        "a step knows its turn and the calls that are left"
    )


class Mending(Tools):
    repair_json = True


BROKEN = '<tool_call>{"name": "double", "arguments": {"number": 1,}}</tool_call>'


async def test_broken_json_is_mended_where_the_environment_asks_for_it_and_counted():
    turn = f"{BROKEN}<tool_call>no json at all</tool_call>{BROKEN.replace('double', 'nothing')}"

    strict = await play(Tools(), [turn, "done"])
    mending = await play(Mending(), [turn, "done"], max_parse_errors=2)

    result = mending.turns[0].tool_results[0]
    assert (kinds(strict), kinds(mending)) == (["invalid_json"] * 3, [None, "invalid_json", "invalid_json"])
    assert (result.repaired, result.text) == (True, "2")
    assert (mending.metrics["repaired_calls"], mending.metrics["parse_errors"]) == (1.0, 2.0)
    assert (strict.metrics["repaired_calls"], mending.stop_reason) == (0.0, "final_answer")


async def test_mended_calls_count_as_calls_and_keep_what_was_sampled():
    record = await play(Mending(), [BROKEN, BROKEN, "done"], max_tool_calls=1)

    assert (record.stop_reason, kinds(record, 1)) == ("max_tool_calls", ["not_run"])
    assert BROKEN in TOKENIZER.decode(record.sequences[0].token_ids)


# Answers go to calls by id, so a turn's ids differ, whatever ids the model or a server gives.


@pytest.mark.parametrize("api", [True, False])
@pytest.mark.parametrize("ids", [("", ""), ("x", "x", "x_1"), ("x_1", "x", "x")])
async def test_calls_to_which_a_server_or_the_model_gives_one_id_are_no_error_of_the_environment(ids, api):
    functions = [{"name": "double", "arguments": f'{{"number": {n}}}'} for n in range(len(ids))]
    told = [{"id": id, "type": "function", "function": one} for id, one in zip(ids, functions, strict=True)]
    written = [{"id": id, **one} for id, one in zip(ids, functions, strict=True)]
    model = Chat({"role": "assistant", "content": "", "tool_calls": told}, "done")
    if not api:
        model = ["".join(f"<tool_call>{json.dumps(one)}</tool_call>" for one in written), "done"]

    record = await play(Tools(), model)

    assert record.stop_reason == "final_answer", record.error
    calls = next(one["tool_calls"] for one in record.messages if one.get("tool_calls"))
    answers = {one["tool_call_id"]: one["content"] for one in tool_messages(record)}
    assert answers == {call["id"]: str(2 * number) for number, call in enumerate(calls)}
    assert len(answers) == len(ids)
    assert ids[0] in ("", calls[0]["id"])
