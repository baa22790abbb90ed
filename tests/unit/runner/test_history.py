"""Rewriting and condensing: a new sequence begins, each sampled token is trained once."""

from __future__ import annotations

import pytest

from agentenv.core import CallStatus, RunLimits, StopReason, ToolCall, Trajectory, UsageError
from agentenv.engine import ChatCompletion, ScriptedEngine, Usage
from agentenv.envs import ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import DropToolOutputs, Runner, RunnerOptions, Summarise
from agentenv.testing import tool_call
from agentenv.tools import tool

TOKENIZER = byte_tokenizer()
DROPS = TOKENIZER.chat_template.replace(
    "if message.reasoning_content", "if message.reasoning_content and loop.last"
)
RENDERER = Renderer(TOKENIZER)


class Reader(ToolEnv):
    def start(self) -> str:
        return "read all pages"

    @tool
    def page(self, number: int) -> str:
        "Read a page."
        return f"page {number}: " + "abcdefghij" * 40


async def play(script, renderer=RENDERER, engine=None, history="verbatim", **options) -> Trajectory:
    engine = engine or ScriptedEngine(script, tokenizer=TOKENIZER)
    play.engine = engine
    limits = options.pop("limits", RunLimits())
    return await Runner(
        engine, renderer, limits, options=RunnerOptions(retries=0, history=history), **options
    ).run_episode(Reader(), {})


def assert_each_sampled_token_is_trained_once(record: Trajectory) -> None:
    assert sum(sequence.num_trained_tokens for sequence in record.sequences) == record.num_sampled_tokens
    for turn in record.turns:
        sequence = record.sequences[turn.sequence]
        assert all(sequence.loss_mask[turn.start : turn.end])
        assert sequence.turn_index[turn.start] == turn.index


async def test_rewriting_drops_thinking_as_the_template_does_and_forks():
    script = [
        "<think>hmm</think>" + tool_call("page", number=1),
        "<think>so</think>" + tool_call("page", number=2),
        "done",
    ]

    verbatim = await play(script, Renderer(TOKENIZER, chat_template=DROPS))
    rewritten = await play(script, Renderer(TOKENIZER, chat_template=DROPS), history="rewrite")

    assert len(verbatim.sequences) == 1
    assert len(rewritten.sequences) == 3
    assert rewritten.metrics["forks_rewrite"] == 2
    assert [turn.sequence for turn in rewritten.turns] == [0, 1, 2]
    assert "<think>" not in play.engine.requests[2].prompt_text
    assert rewritten.messages == verbatim.messages
    assert_each_sampled_token_is_trained_once(rewritten)
    for request, turn in zip(play.engine.requests, rewritten.turns, strict=True):
        assert list(request.prompt_ids) == rewritten.sequences[turn.sequence].token_ids[: turn.start]


async def test_rewriting_what_the_template_writes_the_same_way_forks_nothing():
    script = [tool_call("page", number=1), "done"]

    verbatim = await play(script)
    rewritten = await play(script, history="rewrite")

    assert rewritten.sequences == verbatim.sequences
    assert "forks_rewrite" not in rewritten.metrics


async def test_old_tool_outputs_are_condensed_and_can_be_brought_back_once():
    script = [
        tool_call("page", number=1),
        tool_call("page", number=2),
        tool_call("page", number=3),
        tool_call("recall_block", block=1),
        tool_call("recall_block", block=1),
        tool_call("recall_block", block=True) + tool_call("recall_block", block=99),
        "done",
    ]

    record = await play(script, limits=RunLimits(max_context_tokens=2000), condenser=DropToolOutputs(at=0.4))

    assert record.stop_reason is StopReason.FINAL_ANSWER
    assert record.metrics["forks_tool_outputs"] >= 1
    results = [result for turn in record.turns for result in turn.tool_results]
    full = "page 1: " + "abcdefghij" * 40
    assert results[3].text == full
    assert "already" in results[4].text
    assert "whole number" in results[5].text
    assert "no block 99" in results[6].text
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

    class Both(ScriptedEngine):
        """The same engine plays the policy and the summariser."""

    policy = ScriptedEngine([tool_call("page", number=n) for n in (1, 2, 3)] + ["done"], tokenizer=TOKENIZER)
    writer = Both([summary], tokenizer=TOKENIZER, repeat_last=True)
    condenser = Summarise(writer, renderer=RENDERER, at=0.6, keep_last=2)

    record = await play(None, engine=policy, limits=RunLimits(max_context_tokens=2000), condenser=condenser)

    assert record.stop_reason is StopReason.FINAL_ANSWER
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
    class Chat:
        name, max_context_tokens = "chat", None

        async def chat(self, messages, tools, sampling, *, deadline_s=None):
            return ChatCompletion({"role": "assistant", "content": "s"}, Usage(9, 1), "stop")

        async def close(self):
            pass

    made = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "long long long long long long long long long text"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "1"},
        {"role": "assistant", "content": "end"},
    ]

    view = await Summarise(Chat(), keep_last=2).fresh().shorten(messages)

    assert [message["role"] for message in view.messages] == [
        "user",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert view.messages[-3:] == tuple(messages[-3:])


def test_wrong_settings_and_calls_are_refused():
    with pytest.raises(UsageError, match="at must be"):
        DropToolOutputs(at=0)
    with pytest.raises(UsageError, match="renderer"):
        Summarise(ScriptedEngine(["a"]))
    with pytest.raises(UsageError, match="unknown history 'both'"):
        Runner(ScriptedEngine(["a"], tokenizer=TOKENIZER), RENDERER, options=RunnerOptions(history="both"))
    broken = DropToolOutputs().fresh().recall(ToolCall("1", "recall_block", "[1]", CallStatus.OK))
    assert broken.is_error
