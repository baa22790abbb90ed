"""Budgets and overflow: what is clamped, what is cut, and what ends the episode."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.core import ContextTooLong, Trajectory
from agentenv.engine import Sampling, ScriptedEngine
from agentenv.runner import ScriptedUser
from agentenv.testing import tool_call
from agentenv.tools import tool
from scenes import RENDERER, TOKENIZER, Tools, play, runner


class Printer(Tools):
    @tool(max_output_tokens=40)
    def brief(self, size: int) -> str:
        "Print, with a limit of its own."
        return "y" * size


def show(size: int) -> str:
    return tool_call("show", size=size)


def cost_of(turn: str) -> int:
    """How many tokens a turn has, with the one that ends it."""
    return len(TOKENIZER.encode(turn)) + 1


PROMPT = asyncio.run(play(Printer())).turns[0].start
"""How many tokens the first prompt has."""


async def asked(script, env=None, **settings) -> tuple[Trajectory, list[int]]:
    """Play an episode; return it with the number of tokens that each turn was given."""
    playing = runner(script, retries=0, **settings)
    record = await playing.run_episode(env or Printer(), {})
    return record, [request.sampling.max_tokens for request in playing.engine.requests]


def assert_aligned(record: Trajectory) -> None:
    for sequence in record.sequences:
        size = len(sequence)
        assert len(sequence.token_ids) == len(sequence.loss_mask) == len(sequence.logprobs) == size
        assert sum(sequence.loss_mask) == sum(turn.num_tokens for turn in record.turns)


async def test_a_whole_call_in_a_cut_completion_is_answered_not_run():
    sampling = Sampling(max_tokens=cost_of(show(3)) + 1)

    record = await play(Printer(), [show(3) + "and more"], sampling=sampling)

    (result,) = record.turns[0].tool_results
    assert result.error_kind == "not_run"
    assert "cut" in result.text
    assert record.messages[-1] == result.to_message()
    assert len(record.sequences[0].spans) == 2


@pytest.mark.parametrize(
    ("limits", "of_engine", "sizes"),
    [
        ({"max_context_tokens": PROMPT + 60, "max_tokens_per_turn": 64}, None, [60]),
        ({"max_context_tokens": PROMPT}, None, []),  # with nothing left the engine is not called
        ({"max_context_tokens": PROMPT + 50}, PROMPT + 5, [5]),
    ],
)
async def test_generation_is_clamped_to_what_the_context_leaves(limits, of_engine, sizes):
    engine = ScriptedEngine(["a" * 500], tokenizer=TOKENIZER, max_context_tokens=of_engine)

    record, given = await asked(engine, **limits)

    assert given == sizes
    assert len(record.sequences[0]) == PROMPT + sum(sizes)
    assert record.stop_reason == ("generation_length" if sizes else "context_length")
    assert (len(record.turns), record.trainable) == (len(sizes), bool(sizes))


async def test_the_episode_s_sampled_tokens_are_bounded():
    cost = cost_of(show(1))

    record, given = await asked([show(1), show(1), "done"], max_total_tokens=2 * cost)

    assert given == [2 * cost, cost]
    assert (record.stop_reason, record.num_sampled_tokens) == ("generation_length", 2 * cost)


@pytest.mark.parametrize("spare", [0, 1])
async def test_with_the_sampled_tokens_used_up_no_call_is_run_and_nothing_is_shown(spare):
    cost = cost_of(show(1))

    record = await play(Printer(), [show(1), "done"], max_total_tokens=cost + spare)

    (result,) = record.turns[0].tool_results
    assert (record.stop_reason, len(record.turns)) == ("generation_length", 1 + spare)
    assert len(record.sequences[0]) == record.turns[-1].end, "the last token was sampled"
    assert result.is_error == (spare == 0)
    assert spare or f"max_total_tokens={cost}" in result.text


async def test_a_megabyte_of_output_is_cut_inside_the_observation():
    limits = {"max_context_tokens": PROMPT + 250, "max_tool_output_tokens": None}

    record = await play(Printer(), [show(1_000_000), "ok"], **limits)

    (result,) = record.turns[0].tool_results
    shown = RENDERER.decode(record.sequences[0].token_ids)
    assert (record.stop_reason, record.metrics["trimmed_outputs"]) == ("final_answer", 1)
    assert (result.trimmed, result.full_chars, result.text[0], result.text[-1]) == (True, 1_000_000, "x", "x")
    assert "9" in result.text
    assert len(record.sequences[0]) <= PROMPT + 250
    assert f"<tool_response>{result.text}</tool_response><|im_end|>\n<|im_start|>assistant\nok" in shown
    assert_aligned(record)


async def test_the_observation_is_cut_to_the_token():
    record, given = await asked([show(5000), "ok"], max_context_tokens=PROMPT + 300, min_answer_tokens=20)

    assert PROMPT + 300 - record.turns[1].start == given[1]
    assert 20 <= given[1] <= 22


async def test_exact_fit_is_not_cut_and_sampled_tokens_never_are():
    whole = await play(Printer(), [show(120), "ok"])
    sampled = PROMPT + cost_of(show(120))

    for missing in range(125):
        limit = whole.turns[1].start + 4 - missing
        record = await play(Printer(), [show(120), "ok"], max_context_tokens=limit, min_answer_tokens=4)
        ids = record.sequences[0].token_ids
        assert ids[:sampled] == whole.sequences[0].token_ids[:sampled]
        if not record.turns[0].tool_results:
            assert record.stop_reason == "generation_length"
            continue
        assert record.turns[0].tool_results[0].trimmed == (0 < missing <= 120)
        if missing <= 120:
            assert record.stop_reason == "final_answer"
            end = "</tool_response><|im_end|>\n<|im_start|>assistant\nok<|im_end|>"
            assert RENDERER.decode(ids).endswith(end)
        else:
            assert (record.stop_reason, len(ids)) == ("tool_output_overflow", sampled)


async def test_several_results_share_the_room_and_the_small_ones_stay_whole():
    record = await play(Printer(), [show(5) + show(900) + show(700), "ok"], max_context_tokens=PROMPT + 700)

    small, large, middle = record.turns[0].tool_results
    assert (small.text, small.trimmed, large.trimmed, middle.trimmed) == ("xxxxx", False, True, True)
    assert abs(len(large.text) - len(middle.text)) <= 3
    assert record.stop_reason == "final_answer"


async def test_the_tool_s_own_limit_and_the_run_s_hold_both():
    turn = tool_call("brief", size=100) + show(100)

    record = await play(Printer(), [turn, "ok"], max_tool_output_tokens=60)
    strict = await play(Printer(), [turn, "ok"], max_tool_output_tokens=30)

    brief, shown = (len(result.text) for result in record.turns[0].tool_results)
    assert brief <= 40 < shown <= 60
    assert all(len(one.text) <= 30 and one.trimmed for one in strict.turns[0].tool_results)


async def test_a_prompt_that_the_engine_refuses_as_too_long_is_truncated_and_not_retried():
    def refuse(request):
        raise ContextTooLong("prompt too long: 9000 > 8192")

    playing = runner(refuse, retries=5)

    record = await playing.run_episode(Printer(), {})

    assert (len(playing.engine.requests), playing.ledger.retried) == (1, 0)
    assert (record.stop_reason, record.truncated, record.error) == ("context_length", True, None)


async def test_a_long_user_turn_is_cut_and_no_generation_is_wasted():
    class Talker(Printer):
        ends_on_text = False

    limits = {"max_context_tokens": PROMPT + 120, "min_answer_tokens": 8}
    record = await play(Talker(), ["hi", "bye"], user=ScriptedUser(["u" * 500]), **limits)

    said = [message for message in record.messages if message["role"] == "user"][-1]["content"]
    assert 0 < len(said) < 120
    assert said.startswith("u")
    assert (record.stop_reason, len(record.turns)) == ("user_done", 2)
    assert record.metrics["trimmed_outputs"] == 1
    assert_aligned(record)
