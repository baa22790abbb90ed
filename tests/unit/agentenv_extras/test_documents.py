"""Documents that do not fit the context: passages, keywords, and summaries that a group shares."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import EngineUnavailable, RunLimits, UsageError
from agentenv.engine import ChatCompletion, ScriptedEngine, Usage
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions
from agentenv.runs.store import decode_trajectory, encode_trajectory
from agentenv.testing import tool_call
from agentenv_bridges import to_sft
from agentenv_extras import Keywords, Passages, SummarisePassages, split_passages
from helpers.waiting import until

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
LIMITS = RunLimits(max_context_tokens=4000)
QUESTION = "Which animal lives in Passage 7?"
PASSAGES = [
    f"Passage {number}: in the forest there is, as everybody who was there knows and tells, one animal, and "
    f"it is the Animal{number}x, which likes to be there, and it is said to like it very much. " * 3 + "\n\n"
    for number in range(1, 13)
]
DOCUMENT = "Read this.\n\n" + "".join(PASSAGES) + QUESTION


class Documents(ToolEnv):
    def start(self):
        return DOCUMENT

    def reward(self, answer: str) -> float:
        return float("Animal7x" in answer)


DOCUMENTS = EnvSpec.of("long/Documents-v0", Documents, tasks=[{}])


async def play(script, condenser, engine=None, limits=LIMITS):
    engine = engine or ScriptedEngine(script, tokenizer=TOKENIZER)
    renderer = None if isinstance(engine, Talks) else RENDERER
    runner = Runner(engine, renderer, limits, options=RunnerOptions(retries=0, condenser=condenser))
    return await runner.run_episode(Documents(), {})


class Talks:
    """A chat engine that summarises passages once it has been asked for `opens_at` of them.

    Otherwise it says that it is the seventh animal.
    """

    name, max_context_tokens = "talks", 2000

    def __init__(self, opens_at=0):
        self.heard, self.summarised, self.waiting, self.opens_at = [], [], [], opens_at
        self.failing = 0
        self.gate = asyncio.Event()

    async def chat(self, messages, tools, sampling, *, deadline_s=None):
        asked = str(messages[-1]["content"])
        if not asked.startswith("Summarise"):
            self.heard.append(messages)
            return self.say("Animal7x")
        self.summarised.append(asked)
        self.waiting.append(asked)
        if len(self.waiting) == self.opens_at:
            self.gate.set()
        try:
            await self.gate.wait()
        finally:
            self.waiting.remove(asked)
        if self.failing:
            self.failing -= 1
            raise EngineUnavailable("busy")
        return self.say(f"about {asked.split('Animal')[1][:2]}")

    def say(self, text):
        return ChatCompletion({"role": "assistant", "content": text}, Usage(10, 3), "stop")

    async def close(self):
        pass


@given(
    st.text(alphabet="ab. \nPé", max_size=400),
    st.integers(1, 60),
    st.sampled_from(["", "^P", "a|", r"\Z"]),
)
def test_passages_joined_are_the_text(text, max_chars, pattern):
    passages = split_passages(text, max_chars, pattern=pattern)
    assert "".join(passages) == text
    assert all(0 < len(passage) <= max_chars for passage in passages)


def test_passages_are_split_as_early_as_they_fit():
    assert split_passages("one two.\n\nthree four. five six", 14) == [
        "one two.\n\n",
        "three four. ",
        "five six",
    ]
    assert split_passages("P1 a\nP2 b\nP3 c", pattern="^P") == ["P1 a\n", "P2 b\n", "P3 c"]
    assert split_passages("a b c d", 4) == ["a b ", "c d"]
    with pytest.raises(UsageError, match="not a regular expression"):
        split_passages("a", pattern="(")
    with pytest.raises(UsageError, match="max_chars must be at least 1"):
        split_passages("a", 0)


async def test_a_first_message_that_does_not_fit_is_condensed_only_if_the_run_asks_for_it():
    refused = await play(["Animal7x"], None)
    assert (refused.stop_reason, refused.turns) == ("context_length", ())
    kept = await play(["Animal7x"], {"name": "agentenv_extras:Keywords", "opening": False})
    assert kept.stop_reason == "context_length"

    settings = {"name": "agentenv_extras:Keywords", "pattern": "^Passage", "ratio": 12.0}
    script = [tool_call("recall_block", block=7), "Animal7x"]
    record = await play(script, settings)
    assert (record.stop_reason, record.reward) == ("final_answer", 1.0)
    assert record.messages[0]["content"] == DOCUMENT
    assert record.turns[0].tool_results[0].content == PASSAGES[6]
    (rewrite,) = record.rewrites
    shown = str(rewrite.messages[0]["content"])
    assert (rewrite.turn, rewrite.cause) == (0, "passages")
    assert shown.startswith("Read this.\n\n[block 1: ")
    assert shown.endswith(f"\n\n{QUESTION}")
    assert all(f"Animal{number}x" in shown for number in range(1, 13))
    (sequence,) = record.sequences
    assert sum(sequence.loss_mask) == record.num_sampled_tokens
    assert shown in TOKENIZER.decode(sequence.token_ids)
    assert decode_trajectory(encode_trajectory(record)).rewrites == record.rewrites


async def test_the_row_for_fine_tuning_has_what_the_model_was_shown():
    settings = {"name": "agentenv_extras:Keywords", "pattern": "^Passage", "ratio": 12.0}
    record = await play([tool_call("recall_block", block=7), "Animal7x"], settings)
    (row,) = to_sft([record])
    assert row["messages"][0] == record.rewrites[0].messages[0]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert not any("weight" in message for message in row["messages"])


async def test_what_is_short_or_at_an_end_or_not_from_user_or_tool_stays():
    long = "word " * 200
    messages = [
        {"role": "system", "content": long},
        {"role": "user", "content": "short"},
        {"role": "assistant", "content": long},
        {"role": "user", "content": [{"type": "text", "text": long}]},
    ]
    assert await Keywords().fresh().shorten(messages) is None
    condenser = Keywords(ratio=10).fresh()
    once = await condenser.shorten([*messages, {"role": "tool", "content": long}])
    assert once.messages[:4] == tuple(messages)
    assert once.messages[4]["content"].startswith("[block 1: 1000 characters condensed]\nword")
    assert await condenser.shorten(once.messages) is None
    assert condenser.blocks == [long]
    assert (await condenser.fresh().shorten([{"role": "tool", "content": long}])) is not None


async def test_keywords_are_long_and_rare_words_names_and_numbers():
    ((words, tokens),) = await Keywords(ratio=3).condense(
        ["the treaty of Utrecht was signed in 1713 and the"]
    )
    assert (words, tokens) == ("Utrecht 1713", 0)


async def test_equal_passages_of_a_group_are_summarised_once_and_all_at_once():
    engine = Talks(12)
    settings = {"name": "agentenv_extras:SummarisePassages", "pattern": "^Passage"}
    runner = Runner(engine, None, options=RunnerOptions(condenser=settings))
    (group,) = [group async for group in runner.run_groups(DOCUMENTS, [{}], 4)]
    assert [record.reward for record in group] == [1.0] * 4
    assert len(engine.summarised) == len(set(engine.summarised)) == 12
    # Each episode counts the summaries that it shows, whoever asked for them.
    assert {record.metrics["condenser_tokens"] for record in group} == {36.0}
    assert "about 7x" in str(engine.heard[0][0]["content"])


async def test_a_summary_outlives_one_of_its_episodes_but_not_all_and_failures_are_not_kept():
    engine = Talks()
    condenser = SummarisePassages(engine, pattern="^Passage")
    messages = [{"role": "user", "content": DOCUMENT}]
    first, second = (asyncio.ensure_future(condenser.fresh().shorten(messages)) for _ in range(2))
    await until(lambda: len(engine.waiting) == 12)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    engine.gate.set()
    assert (await second) is not None
    assert len(engine.summarised) == 12

    engine = Talks()
    condenser = SummarisePassages(engine, pattern="^Passage")
    alone = asyncio.ensure_future(condenser.fresh().shorten(messages))
    await until(lambda: len(engine.waiting) == 12)
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)
    await until(lambda: not engine.waiting)

    engine.gate.set()
    engine.failing = 1
    with pytest.raises(EngineUnavailable):
        await condenser.fresh().shorten(messages)
    assert (await condenser.fresh().shorten(messages)) is not None


async def test_new_weights_write_new_summaries():
    asked = []
    engine = ScriptedEngine(lambda request: asked.append(request) or "so", tokenizer=TOKENIZER)
    condenser = SummarisePassages(engine, renderer=RENDERER, pattern="^Passage")
    messages = [{"role": "user", "content": DOCUMENT}]
    for version, calls in ((0, 12), (0, 12), (1, 24)):
        engine.weights_version = version
        assert (await condenser.fresh().shorten(messages)) is not None
        assert len(asked) == calls


def test_wrong_settings_are_refused():
    for wrong in ({"min_chars": 10}, {"keep_ends": -1}, {"ratio": 1}, {"max_chars": 0}, {"pattern": "("}):
        with pytest.raises(UsageError):
            Keywords(**wrong)
    with pytest.raises(NotImplementedError, match="must write condense"):
        asyncio.run(Passages().condense(["a"]))
