"""Rewriting and condensing: a new sequence begins, each sampled token is trained once."""

from __future__ import annotations

import pytest

from agentenv.core import CallStatus, ToolCall, Trajectory, UsageError
from agentenv.engine import ScriptedEngine
from agentenv.envs import ToolEnv
from agentenv.render import Renderer
from agentenv.runner import DropToolOutputs, Summarise
from agentenv.testing import tool_call
from agentenv.tools import tool
from scenes import RENDERER, TOKENIZER, Chat, play, runner

DROPS = TOKENIZER.chat_template.replace(
    "if message.reasoning_content", "if message.reasoning_content and loop.last"
)


class Reader(ToolEnv):
    def start(self) -> str:
        return "read all pages"

    @tool
    def page(self, number: int) -> str:
        "Read a page."
        return f"page {number}: " + "abcdefghij" * 40


def page(number: int) -> str:
    return tool_call("page", number=number)


def assert_each_sampled_token_is_trained_once(record: Trajectory) -> None:
    assert sum(sequence.num_trained_tokens for sequence in record.sequences) == record.num_sampled_tokens
    for turn in record.turns:
        sequence = record.sequences[turn.sequence]
        assert all(sequence.loss_mask[turn.start : turn.end])
        assert sequence.turn_index[turn.start] == turn.index


async def test_rewriting_drops_thinking_as_the_template_does_and_forks():
    script = [f"<think>hmm</think>{page(1)}", f"<think>so</think>{page(2)}", "done"]
    playing = runner(script, renderer=Renderer(TOKENIZER, chat_template=DROPS), history="rewrite")

    verbatim = await play(Reader(), script, renderer=Renderer(TOKENIZER, chat_template=DROPS))
    rewritten = await playing.run_episode(Reader(), {})

    assert (len(verbatim.sequences), len(rewritten.sequences)) == (1, 3)
    assert rewritten.metrics["forks_rewrite"] == 2
    assert [turn.sequence for turn in rewritten.turns] == [0, 1, 2]
    assert "<think>" not in playing.engine.requests[2].prompt_text
    assert rewritten.messages == verbatim.messages
    assert_each_sampled_token_is_trained_once(rewritten)
    for request, turn in zip(playing.engine.requests, rewritten.turns, strict=True):
        assert list(request.prompt_ids) == rewritten.sequences[turn.sequence].token_ids[: turn.start]


async def test_rewriting_what_the_template_writes_the_same_way_forks_nothing():
    verbatim = await play(Reader(), [page(1), "done"])
    rewritten = await play(Reader(), [page(1), "done"], history="rewrite")

    assert rewritten.sequences == verbatim.sequences
    assert "forks_rewrite" not in rewritten.metrics


async def test_old_tool_outputs_are_condensed_and_can_be_brought_back_once():
    recall = tool_call("recall_block", block=1)
    wrong = (
        tool_call("recall_block", block=True)
        + tool_call("recall_block", block=99)
        + tool_call("recall_block", block=0)
    )
    script = [page(1), page(2), page(3), recall, recall, wrong, "done"]

    record = await play(Reader(), script, max_context_tokens=2000, condenser=DropToolOutputs(at=0.4))

    assert record.stop_reason == "final_answer"
    assert record.metrics["forks_tool_outputs"] >= 1
    results = [result for turn in record.turns for result in turn.tool_results]
    full = "page 1: " + "abcdefghij" * 40
    assert results[3].text == full
    assert "already" in results[4].text
    assert "whole number" in results[5].text
    assert "no block 99" in results[6].text
    assert "no block 0" in results[7].text
    assert record.messages[2]["content"] == full, "the record keeps what was condensed"
    forked = record.sequences[-1]
    assert "[block 1: 408 characters condensed]" in RENDERER.decode(forked.token_ids)
    assert forked.spans[0].source == "prompt"
    assert_each_sampled_token_is_trained_once(record)


async def test_what_is_not_condensed_stays_byte_for_byte():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q\n\n  x"},
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "short"},
        {"role": "tool", "tool_call_id": "b", "name": "f", "content": "l" * 100},
        {"role": "tool", "tool_call_id": "c", "name": "f", "content": "m" * 100},
    ]
    condenser = DropToolOutputs(keep_last=1, min_chars=100).fresh()

    nothing = await DropToolOutputs(keep_last=9).fresh().shorten(messages)
    view = await condenser.shorten(messages)

    assert nothing is None
    assert [view.messages[place] for place in (0, 1, 2, 4)] == [messages[place] for place in (0, 1, 2, 4)]
    assert view.messages[3] == {**messages[3], "content": "[block 1: 100 characters condensed]"}
    assert condenser.blocks == ["l" * 100]
    assert DropToolOutputs().blocks == []


async def test_a_summariser_s_tokens_are_other_and_count_for_the_budget():
    summary = "Pages 1 and 2 say abc."

    writer = ScriptedEngine([summary], tokenizer=TOKENIZER, repeat_last=True)
    condenser = Summarise(writer, renderer=RENDERER, at=0.6, keep_last=2)

    script = [page(1), page(2), page(3), "done"]
    record = await play(Reader(), script, max_context_tokens=2000, condenser=condenser)

    assert record.stop_reason == "final_answer"
    assert record.metrics["forks_summary"] >= 1
    wrote = len(TOKENIZER.encode(summary)) + 1
    assert record.metrics["condenser_tokens"] == wrote * record.metrics["forks_summary"]
    other = [span for sequence in record.sequences for span in sequence.spans if span.source == "other"]
    assert [RENDERER.decode(span.token_ids) for span in other] == [summary] * len(other)
    assert len(other) == record.metrics["forks_summary"]
    assert_each_sampled_token_is_trained_once(record)


async def test_a_summary_that_is_not_shorter_is_not_taken():
    writer = ScriptedEngine(["x" * 5000], tokenizer=TOKENIZER, repeat_last=True)
    condenser = Summarise(writer, renderer=RENDERER).fresh()
    messages = [{"role": "user", "content": "q"}, *({"role": "user", "content": "abc"} for _ in range(9))]

    assert await condenser.shorten(messages) is None
    assert condenser.blocks == []


async def test_a_summary_keeps_a_call_and_its_results_together():
    made = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "long long long long long long long long long text"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "1"},
        {"role": "assistant", "content": "end"},
    ]

    view = await Summarise(Chat("s"), keep_last=2).fresh().shorten(messages)

    roles = [message["role"] for message in view.messages]
    assert roles == ["user", "user", "assistant", "tool", "assistant"]
    assert view.messages[-3:] == tuple(messages[-3:])


def test_wrong_settings_and_calls_are_refused():
    with pytest.raises(UsageError, match="at must be"):
        DropToolOutputs(at=0)
    with pytest.raises(UsageError, match="renderer"):
        Summarise(ScriptedEngine(["a"]))
    with pytest.raises(UsageError, match="unknown history 'both'"):
        runner(history="both")
    broken = DropToolOutputs().fresh().recall(ToolCall("1", "recall_block", "[1]", CallStatus.OK))
    assert broken.is_error
