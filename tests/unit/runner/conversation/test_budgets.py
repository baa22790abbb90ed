"""Budgets and overflow: what is clamped, what is cut, and what ends the episode."""

from __future__ import annotations

import pytest

from agentenv.core import ContextTooLong, RunLimits, StopReason, Trajectory
from agentenv.engine import Sampling, ScriptedEngine
from agentenv.envs import ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions, ScriptedUser
from agentenv.testing import tool_call
from agentenv.tools import tool

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)


class Printer(ToolEnv):
    """Prints as much as it is asked to."""

    def start(self) -> str:
        return "go"

    @tool
    def show(self, size: int) -> str:
        "Print."
        return "x" * size

    @tool(max_output_tokens=40)
    def brief(self, size: int) -> str:
        "Print, with a limit of its own."
        return "y" * size


class Talker(Printer):
    ends_on_text = False


async def play(script, env=None, *, user=None, sampling=None, engine_limit=None, **limits) -> Trajectory:
    engine = ScriptedEngine(script, tokenizer=TOKENIZER, max_context_tokens=engine_limit)
    runner = Runner(
        engine, RENDERER, RunLimits(**limits), options=RunnerOptions(retries=0), sampling=sampling
    )
    record = await runner.run_episode(env or Printer(), {}, user=user)
    play.requests = engine.requests
    return record


def sizes() -> list[int]:
    return [request.sampling.max_tokens for request in play.requests]


def prompt_size() -> int:
    return len(play.requests[0].prompt_ids)


def assert_aligned(record: Trajectory) -> None:
    for sequence in record.sequences:
        size = len(sequence)
        assert len(sequence.token_ids) == len(sequence.loss_mask) == len(sequence.logprobs) == size
        assert sum(sequence.loss_mask) == sum(turn.num_tokens for turn in record.turns)


async def test_engine_length_is_truncated_and_runs_no_tool():
    record = await play([tool_call("show", size=3)], sampling=Sampling(max_tokens=70))
    cut = await play([tool_call("show", size=3)], sampling=Sampling(max_tokens=30))

    assert len(record.turns[0].tool_results) == 1
    assert record.stop_reason is not StopReason.GENERATION_LENGTH
    assert cut.stop_reason is StopReason.GENERATION_LENGTH
    assert cut.truncated
    assert not cut.terminated
    assert cut.metrics["tool_calls"] == 0
    assert all(result.error_kind == "not_run" for result in cut.turns[0].tool_results)


async def test_a_whole_call_in_a_cut_completion_is_answered_not_run():
    turn = tool_call("show", size=3)
    record = await play([turn + "and more"], sampling=Sampling(max_tokens=len(TOKENIZER.encode(turn)) + 2))

    (result,) = record.turns[0].tool_results
    assert result.error_kind == "not_run"
    assert "cut" in result.text
    assert record.messages[-1] == result.to_message()
    assert len(record.sequences[0].spans) == 2


async def test_generation_is_clamped_to_what_the_context_leaves():
    await play(["hi"])
    prompt = prompt_size()

    record = await play(["a" * 500], max_context_tokens=prompt + 60, max_tokens_per_turn=64)

    assert sizes() == [60]
    assert len(record.sequences[0]) == prompt + 60
    assert record.stop_reason is StopReason.GENERATION_LENGTH


async def test_with_nothing_left_the_engine_is_not_called():
    await play(["hi"])
    prompt = prompt_size()

    record = await play(["hi"], max_context_tokens=prompt)

    assert play.requests == []
    assert record.stop_reason is StopReason.CONTEXT_LENGTH
    assert record.turns == ()
    assert record.truncated
    assert not record.trainable
    assert len(record.sequences[0]) == prompt


async def test_the_engine_s_own_limit_holds_too():
    await play(["hi"])
    prompt = prompt_size()

    await play(["a"], engine_limit=prompt + 5, max_context_tokens=prompt + 50)

    assert sizes() == [5]


async def test_the_episode_s_sampled_tokens_are_bounded():
    turn = tool_call("show", size=1)
    cost = len(TOKENIZER.encode(turn)) + 1

    record = await play([turn, turn, "done"], max_total_tokens=2 * cost)

    assert sizes() == [2 * cost, cost]
    assert record.stop_reason is StopReason.GENERATION_LENGTH
    assert record.num_sampled_tokens == 2 * cost


@pytest.mark.parametrize("spare", [0, 1])
async def test_with_the_sampled_tokens_used_up_no_call_is_run_and_nothing_is_shown(spare):
    turn = tool_call("show", size=1)
    cost = len(TOKENIZER.encode(turn)) + 1

    record = await play([turn, "done"], max_total_tokens=cost + spare)

    assert record.stop_reason is StopReason.GENERATION_LENGTH
    assert len(record.turns) == 1 + spare
    assert len(record.sequences[0]) == record.turns[-1].end, "the last token was sampled"
    (result,) = record.turns[0].tool_results
    assert result.is_error == (spare == 0)
    if not spare:
        assert f"max_total_tokens={cost}" in result.text


async def test_any_limit_between_prompt_and_second_turn_keeps_the_record_aligned():
    whole = await play([tool_call("show", size=50), "done"])
    prompt, total = prompt_size(), len(whole.sequences[0])
    seen = set()

    for limit in range(prompt, total + 2):
        record = await play(
            [tool_call("show", size=50), "done"], max_context_tokens=limit, min_answer_tokens=1
        )
        assert_aligned(record)
        assert len(record.sequences[0]) <= limit
        assert record.sequences[0].token_ids[:prompt] == whole.sequences[0].token_ids[:prompt]
        assert record.error is None
        seen.add(record.stop_reason)

    assert seen == {
        StopReason.CONTEXT_LENGTH,
        StopReason.GENERATION_LENGTH,
        StopReason.TOOL_OUTPUT_OVERFLOW,
        StopReason.FINAL_ANSWER,
    }


async def test_a_megabyte_of_output_is_cut_inside_the_observation():
    await play(["hi"])
    prompt = prompt_size()
    limit = prompt + 250

    record = await play(
        [tool_call("show", size=1_000_000), "ok"], max_context_tokens=limit, max_tool_output_tokens=None
    )

    (result,) = record.turns[0].tool_results
    assert record.stop_reason is StopReason.FINAL_ANSWER
    assert result.trimmed
    assert result.full_chars == 1_000_000
    assert result.text.startswith("x")
    assert result.text.endswith("x")
    assert "9" in result.text
    assert len(record.sequences[0]) <= limit
    shown = RENDERER.decode(record.sequences[0].token_ids)
    assert f"<tool_response>{result.text}</tool_response><|im_end|>\n<|im_start|>assistant\nok" in shown
    assert record.metrics["trimmed_outputs"] == 1
    assert_aligned(record)


async def test_the_observation_is_cut_to_the_token():
    await play(["hi"])
    limit = prompt_size() + 300

    await play([tool_call("show", size=5000), "ok"], max_context_tokens=limit, min_answer_tokens=20)

    second = play.requests[1]
    assert limit - len(second.prompt_ids) == second.sampling.max_tokens
    assert 20 <= second.sampling.max_tokens <= 22


async def test_exact_fit_is_not_cut_and_sampled_tokens_never_are():
    turn = tool_call("show", size=120)
    whole = await play([turn, "ok"])
    before_answer = len(play.requests[1].prompt_ids)
    prompt = prompt_size()
    completion = len(TOKENIZER.encode(turn)) + 1

    for missing in range(125):
        limit = before_answer + 4 - missing
        record = await play([turn, "ok"], max_context_tokens=limit, min_answer_tokens=4)
        ids = record.sequences[0].token_ids
        assert ids[: prompt + completion] == whole.sequences[0].token_ids[: prompt + completion]
        if not record.turns[0].tool_results:
            assert record.stop_reason is StopReason.GENERATION_LENGTH
            continue
        assert record.turns[0].tool_results[0].trimmed == (0 < missing <= 120)
        if missing <= 120:
            assert record.stop_reason is StopReason.FINAL_ANSWER
            assert RENDERER.decode(ids).endswith(
                "</tool_response><|im_end|>\n<|im_start|>assistant\nok<|im_end|>"
            )
        else:
            assert record.stop_reason is StopReason.TOOL_OUTPUT_OVERFLOW
            assert len(ids) == prompt + completion


async def test_several_results_share_the_room_and_the_small_ones_stay_whole():
    turn = tool_call("show", size=5) + tool_call("show", size=900) + tool_call("show", size=700)
    await play(["hi"])

    record = await play([turn, "ok"], max_context_tokens=prompt_size() + 700)

    small, large, middle = record.turns[0].tool_results
    assert small.text == "xxxxx"
    assert not small.trimmed
    assert large.trimmed
    assert middle.trimmed
    assert abs(len(large.text) - len(middle.text)) <= 3
    assert record.stop_reason is StopReason.FINAL_ANSWER


async def test_the_tool_s_own_limit_and_the_run_s_hold_both():
    record = await play(
        [tool_call("brief", size=100) + tool_call("show", size=100), "ok"], max_tool_output_tokens=60
    )
    strict = await play(
        [tool_call("brief", size=100) + tool_call("show", size=100), "ok"], max_tool_output_tokens=30
    )

    assert [
        len(RENDERER.decode(RENDERER.tokenizer.encode(one.text))) <= 60
        for one in record.turns[0].tool_results
    ]
    assert len(record.turns[0].tool_results[0].text) <= 40 < len(record.turns[0].tool_results[1].text) <= 60
    assert all(len(one.text) <= 30 and one.trimmed for one in strict.turns[0].tool_results)


async def test_a_call_on_the_last_turn_is_not_run_and_reward_sees_why():
    seen = {}

    class Judged(Printer):
        def reward(self, stop_reason: str, trajectory: Trajectory) -> float:
            seen.update(reason=stop_reason, truncated=trajectory.truncated)
            return 0.25

    record = await play([tool_call("show", size=3)], Judged(), max_turns=1)

    assert record.stop_reason is StopReason.MAX_TURNS
    assert record.truncated
    assert seen == {"reason": "max_turns", "truncated": True}
    assert record.metrics["tool_calls"] == 0
    assert record.messages[-1]["role"] == "tool"
    assert "not run" in record.messages[-1]["content"]
    assert record.sequences[0].loss_mask[-1]
    assert record.turn_rewards == (0.25,)


async def test_a_prompt_that_the_engine_refuses_as_too_long_is_truncated_and_not_retried():

    class Refusing(ScriptedEngine):
        tries = 0

        async def generate(self, *args, **kwargs):
            Refusing.tries += 1
            raise ContextTooLong("prompt too long: 9000 > 8192")

    runner = Runner(Refusing(["a"], tokenizer=TOKENIZER), RENDERER, options=RunnerOptions(retries=5))

    record = await runner.run_episode(Printer(), {})

    assert Refusing.tries == 1
    assert runner.ledger.retried == 0
    assert record.stop_reason is StopReason.CONTEXT_LENGTH
    assert record.truncated
    assert record.error is None


async def test_a_long_user_turn_is_cut_and_no_generation_is_wasted():
    await play(["hi"], Talker(), user=ScriptedUser([]))
    user = ScriptedUser(["u" * 500])
    limit = prompt_size() + 120

    record = await play(["hi", "bye"], Talker(), user=user, max_context_tokens=limit, min_answer_tokens=8)

    said = [message for message in record.messages if message["role"] == "user"][-1]["content"]
    assert 0 < len(said) < 120
    assert said.startswith("u")
    assert record.metrics["trimmed_outputs"] == 1
    assert len(play.requests) == 2
    assert record.stop_reason is StopReason.USER_DONE
    assert_aligned(record)


@pytest.mark.parametrize("text", ["x" * 400, "é" * 200, "🙂" * 100, "a\n" * 200, "日本語テキスト" * 40])
@pytest.mark.parametrize("limit", [0, 1, 2, 7, 33, 64, 399, 400, 401])
def test_trimmed_text_never_exceeds_its_tokens(text: str, limit: int):
    trimmed = RENDERER.trim(text, limit)

    assert RENDERER.count(trimmed) <= limit
    trimmed.encode("utf-8")
    assert (trimmed == text) == (RENDERER.count(text) <= limit)
