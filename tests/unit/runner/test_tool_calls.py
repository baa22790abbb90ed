"""Tool calls: every call gets exactly one answer, in order, and a broken one is told to the model."""

from __future__ import annotations

import asyncio
import json

import pytest

from agentenv.core import RunLimits, StopReason, Trajectory
from agentenv.engine import ScriptedEngine
from agentenv.envs import ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions
from agentenv.testing import tool_call
from agentenv.tools import tool
from agentenv_bridges import to_sft
from helpers.waiting import until

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)


class Tools(ToolEnv):
    def start(self) -> str:
        self.ran: list[str] = []
        self.both_slow = asyncio.Barrier(2)
        return "go"

    @tool
    async def slow(self, text: str) -> str:
        "Answer after the other slow call has begun and the fast one has answered."
        await self.both_slow.wait()
        await until(lambda: "fast" in self.ran)
        self.ran.append("slow")
        return f"slow {text}"

    @tool
    def fast(self, number: int) -> str:
        "Answer at once."
        self.ran.append("fast")
        return f"fast {number + 1}"


async def play(script, env=None, **limits) -> Trajectory:
    engine = ScriptedEngine(script, tokenizer=TOKENIZER)
    return await Runner(engine, RENDERER, RunLimits(**limits), options=RunnerOptions(retries=0)).run_episode(
        env or Tools(), {}
    )


def tool_messages(record: Trajectory) -> list:
    return [message for message in record.messages if message["role"] == "tool"]


async def test_parallel_calls_are_answered_in_call_order_with_their_ids():
    broken = '<tool_call>{"name": "fast", "arguments": {"number": 1}</tool_call>'
    turn = (
        tool_call("slow", text="a")
        + tool_call("fast", number=1)
        + tool_call("nothing")
        + broken
        + tool_call("slow", text="b")
    )

    record = await play([turn, "done"])

    calls, results = record.turns[0].tool_calls, record.turns[0].tool_results
    assert [one.tool_call_id for one in results] == [one.id for one in calls]
    assert len({one.id for one in calls}) == 5
    assert results[0].text == "slow a"
    assert results[1].text == "fast 2"
    assert results[4].text == "slow b"
    assert results[2].error_kind == "unknown_tool"
    assert results[3].error_kind == "invalid_json"
    assert [one["tool_call_id"] for one in tool_messages(record)] == [one.id for one in calls]
    assert record.metrics["tool_calls"] == 3
    assert record.stop_reason is StopReason.FINAL_ANSWER


@pytest.mark.parametrize("body", ["[1]", "5", "null", '{"name":["f"]}', '{"arguments":{}}', "not json", ""])
async def test_a_malformed_call_is_told_to_the_model_and_the_episode_goes_on(body):
    record = await play([f"<tool_call>{body}</tool_call>", "sorry"])

    assert record.stop_reason is StopReason.FINAL_ANSWER
    assert record.answer == "sorry"
    (message,) = tool_messages(record)
    assert message["content"]
    assert record.turns[0].tool_results[0].is_error
    assert record.metrics["parse_errors"] == 1
    assert message["content"] in RENDERER.decode(record.sequences[0].token_ids)


async def test_a_malformed_call_is_kept_as_it_was_written_and_is_no_part_of_the_answer():
    broken = "<tool_call>[42]</tool_call>"

    record = await play([f"So: {broken}", broken], max_turns=2)

    said = [message for message in record.messages if message["role"] == "assistant"]
    assert [message["content"] for message in said] == [f"So:\n{broken}", broken]
    assert (record.stop_reason, record.answer) == (StopReason.MAX_TURNS, "")


async def test_rows_for_fine_tuning_have_the_malformed_call_and_no_result_without_a_call():
    broken = "<tool_call>[1]</tool_call>"
    record = await play([tool_call("fast", number=1) + broken, "done"])

    (row,) = to_sft([record], min_reward=0.0)

    assert [message["role"] for message in row["messages"]] == [
        "user",
        "assistant",
        "tool",
        "user",
        "assistant",
    ]
    assert row["messages"][1]["content"] == broken
    calls = [call["id"] for call in row["messages"][1]["tool_calls"]]
    assert [message["tool_call_id"] for message in row["messages"] if message["role"] == "tool"] == calls


async def test_the_other_episode_of_the_batch_is_not_affected():

    def script(request):
        return "fine" if "bad" not in request.session_id else "<tool_call>[1]</tool_call>"

    runner = Runner(ScriptedEngine(script, tokenizer=TOKENIZER), RENDERER, RunLimits(max_turns=3))
    bad, good = await asyncio.gather(
        runner.run_episode(Tools(), {}, group_id="bad"), runner.run_episode(Tools(), {}, group_id="good")
    )

    assert bad.stop_reason is StopReason.MAX_TURNS
    assert good.stop_reason is StopReason.FINAL_ANSWER


async def test_the_message_names_the_problem_and_errors_are_limited():
    broken = '<tool_call>{"name":"fast","arguments":{"number":1}</tool_call>'

    record = await play([broken] * 20, max_parse_errors=2, max_turns=30)

    assert record.stop_reason is StopReason.MAX_PARSE_ERRORS
    assert record.truncated
    assert len(record.turns) == 3
    assert record.metrics["parse_errors"] == 3
    assert "JSON" in tool_messages(record)[0]["content"]
    assert len(tool_messages(record)) == 3
    assert record.sequences[0].loss_mask[-1], "what no one reads has no tokens"


async def test_calls_in_thinking_and_other_formats_are_not_executed():
    env = Tools()
    text = f"<think>{tool_call('fast', number=1)}</think>Action: fast[1] <config><name>fast</name></config>"

    record = await play([text], env)

    assert env.ran == []
    assert record.stop_reason is StopReason.FINAL_ANSWER
    assert tool_messages(record) == []


async def test_wrong_arguments_never_run_and_name_the_field():
    env = Tools()
    turn = (
        tool_call("fast", number="3")
        + tool_call("fast", number="x")
        + tool_call("fast")
        + tool_call("fast", number=1, more=2)
    )

    record = await play([turn, "done"], env)

    good, wrong, missing, extra = record.turns[0].tool_results
    assert good.text == "fast 4"
    assert all(one.error_kind == "bad_arguments" for one in (wrong, missing, extra))
    assert "number" in wrong.text
    assert "number" in missing.text
    assert "more" in extra.text
    assert env.ran == ["fast"]


async def test_calls_over_the_limit_in_the_middle_of_a_batch_are_answered_not_run():
    env = Tools()
    turn = tool_call("fast", number=1) + tool_call("fast", number=2) + tool_call("fast", number=3)

    record = await play([turn, "done"], env, max_tool_calls=1)

    first, second, third = record.turns[0].tool_results
    assert first.text == "fast 2"
    assert second.error_kind == third.error_kind == "not_run"
    assert "limit of 1" in second.text
    assert env.ran == ["fast"]
    assert len(tool_messages(record)) == 3
    assert record.stop_reason is StopReason.MAX_TOOL_CALLS
    assert record.truncated


async def test_calls_over_the_limit_of_a_turn_are_not_run_and_the_episode_continues():
    env = Tools()
    turn = "".join(tool_call("fast", number=number) for number in range(3))

    record = await play([turn, tool_call("fast", number=3), "done"], env, max_tool_calls_per_turn=2)

    assert [result.error_kind for result in record.turns[0].tool_results] == [None, None, "not_run"]
    assert "at most 2" in record.turns[0].tool_results[2].text
    assert record.turns[1].tool_results[0].error_kind is None
    assert env.ran == ["fast"] * 3
    assert record.stop_reason is StopReason.FINAL_ANSWER


async def test_calls_over_the_limit_of_a_turn_do_not_use_up_that_of_the_episode():
    turn = "".join(tool_call("fast", number=number) for number in range(3))

    record = await play([turn, turn, "done"], max_tool_calls_per_turn=2, max_tool_calls=4)
    both = await play([turn, turn, "done"], max_tool_calls_per_turn=2, max_tool_calls=3)

    assert record.stop_reason is StopReason.FINAL_ANSWER
    assert both.stop_reason is StopReason.MAX_TOOL_CALLS
    assert [result.error_kind for result in both.turns[1].tool_results] == [None, "not_run", "not_run"]


async def test_calls_that_use_up_the_limit_exactly_do_not_end_the_episode():
    record = await play([tool_call("fast", number=1) + tool_call("fast", number=2), "done"], max_tool_calls=2)
    none = await play([tool_call("fast", number=1), "done"], max_tool_calls=0)

    assert record.stop_reason is StopReason.FINAL_ANSWER
    assert none.stop_reason is StopReason.MAX_TOOL_CALLS
    assert len(none.turns) == 1


async def test_a_closing_turn_is_not_taken_for_text_when_only_broken_calls_stand_in_it():
    seen = []

    class Stepping(Tools):
        async def step(self, action):
            seen.append(action)
            return await super().step(action)

    await play(["thinking aloud <tool_call>[1]</tool_call>", tool_call("fast", number=1), "done"], Stepping())

    assert [len(action.get("tool_calls", ())) for action in seen] == [1, 0]


async def test_values_that_are_no_text_reach_the_model_as_json():

    class Odd(ToolEnv):
        def start(self) -> str:
            return "go"

        @tool
        def odd(self, kind: str) -> object:
            "Return something odd."
            return {
                "dict": {"ok": True, "x": None},
                "none": None,
                "bool": True,
                "nan": float("nan"),
                "bytes": b"ab",
            }[kind]

    kinds = ["dict", "none", "bool", "nan", "bytes"]
    record = await play(["".join(tool_call("odd", kind=kind) for kind in kinds), "done"], Odd())

    texts = [result.text for result in record.turns[0].tool_results]
    assert json.loads(texts[0]) == {"ok": True, "x": None}
    assert texts[2] == "true"
    assert "None" not in texts[1]
    assert record.stop_reason is StopReason.FINAL_ANSWER


async def test_whatever_a_tool_does_the_process_and_the_episode_survive():

    class Wild(ToolEnv):
        def start(self) -> str:
            return "go"

        @tool
        def leave(self) -> str:
            "Leave."
            raise SystemExit(3)

        @tool
        async def hang(self) -> str:
            "Hang."
            await asyncio.Event().wait()
            return ""

        @tool
        def crash(self) -> str:
            "Crash."
            raise ZeroDivisionError("secret detail")

    record = await play(
        [tool_call("leave") + tool_call("hang") + tool_call("crash"), "done"], Wild(), tool_timeout_s=1
    )

    left, hung, crashed = record.turns[0].tool_results
    assert left.is_error
    assert hung.error_kind == "timeout"
    assert crashed.error_kind == "exception"
    assert "ZeroDivisionError" in crashed.detail
    assert record.stop_reason is StopReason.FINAL_ANSWER
    assert record.trainable


async def test_context_knows_the_turn_and_the_calls_that_are_left():
    seen = []

    class Watching(Tools):
        async def step(self, action):
            seen.append((self.context.turn, self.context.tool_calls_left))
            return await super().step(action)

    await play(
        [tool_call("fast", number=1) * 1 + tool_call("fast", number=2), tool_call("fast", number=3), "x"],
        Watching(),
        max_tool_calls=4,
    )

    assert seen == [(0, 4), (1, 2), (2, 1)]


class Mending(Tools):
    repair_json = True


async def test_broken_json_is_mended_where_the_environment_asks_for_it_and_counted():
    broken = '<tool_call>{"name": "fast", "arguments": {"number": 1,}}</tool_call>'
    hopeless = "<tool_call>no json at all</tool_call>"
    unknown = '<tool_call>{"name": "nothing", "arguments": {"number": 1,}}</tool_call>'
    turn = broken + hopeless + unknown

    strict, mending = await play([turn, "done"]), await play([turn, "done"], Mending(), max_parse_errors=2)

    assert [one.error_kind for one in strict.turns[0].tool_results] == ["invalid_json"] * 3
    results = mending.turns[0].tool_results
    assert [one.error_kind for one in results] == [None, "invalid_json", "invalid_json"]
    assert (results[0].repaired, results[0].text) == (True, "fast 2")
    assert (mending.metrics["repaired_calls"], mending.metrics["parse_errors"]) == (1.0, 2.0)
    assert (strict.metrics["repaired_calls"], mending.stop_reason) == (0.0, StopReason.FINAL_ANSWER)


async def test_mended_calls_count_as_calls_and_keep_what_was_sampled():
    broken = '<tool_call>{"name": "fast", "arguments": {"number": 1,}}</tool_call>'

    record = await play([broken, broken, "done"], Mending(), max_tool_calls=1)

    assert record.stop_reason is StopReason.MAX_TOOL_CALLS
    assert record.turns[1].tool_results[0].error_kind == "not_run"
    assert broken in TOKENIZER.decode(record.sequences[0].token_ids)
