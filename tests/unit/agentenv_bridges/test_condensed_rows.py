"""Condensed episodes as supervised data: what the model was shown, each of its turns learned once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from agentenv.engine import ScriptedEngine, Usage
from agentenv.envs import ToolEnv
from agentenv.runner import DropToolOutputs
from agentenv.testing import tool_call
from agentenv.tools import tool
from agentenv_bridges import to_sft
from agentenv_extras import Keywords
from scenes import RENDERER, TOKENIZER, Chat, play

PAGES = [tool_call("page", number=number) for number in range(1, 6)]
HINT = "(The answer is on page 3.)"


class Reader(ToolEnv):
    def start(self):
        # An example before the first turn is no turn.
        return [
            {"role": "user", "content": "an example"},
            {"role": "assistant", "content": "as you like"},
            {"role": "user", "content": f"read all pages {HINT}"},
        ]

    @tool
    def page(self, number: int) -> str:
        "Read a page."
        return f"page {number}: " + "abcdefghij" * 40

    def reward(self, answer: str) -> float:
        return float(answer == "done")


class Talks(Chat):
    """A chat engine that says its lines, and calls tools in them."""

    async def chat(self, messages, tools, sampling, *, deadline_s=None):
        said = await super().chat(messages, tools, sampling)
        read = RENDERER.bind(tools).parse(TOKENIZER.encode(f"{said.message['content']}<|im_end|>"))
        used = sum(len(str(message.get("content"))) for message in messages) // 4
        return replace(said, message=read.message, usage=Usage(used, 5))


async def condensed(last="done"):
    condenser = DropToolOutputs(at=0.6)
    return await play(Reader(), [*PAGES, last], max_context_tokens=2000, condenser=condenser)


async def test_each_row_is_what_the_model_was_shown_and_each_turn_is_learned_once():
    record = await condensed()
    assert len(record.sequences) == len(record.rewrites) + 1 > 2

    rows = list(to_sft([record]))

    bound = RENDERER.bind(record.tools)
    learned = []
    for row, sequence in zip(rows, record.sequences, strict=True):
        mine = [place for place, one in enumerate(row["messages"]) if one["role"] == "assistant"]
        new = [place for place in mine if row["messages"][place].get("weight") != 0]
        if sequence is record.sequences[0]:
            new = new[1:]
        learned += [row["messages"][place] for place in new]
        shown = [{**one} for one in row["messages"][: new[0]]]
        for one in shown:
            one.pop("weight", None)
        first = next(turn for turn in record.turns if record.sequences[turn.sequence] is sequence)
        assert bound.start(shown) == sequence.token_ids[: first.start]
        assert row["messages"][-1]["role"] == "assistant"
    for call in (call for message in learned for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert learned == [turn.message for turn in record.turns]


async def test_an_oracle_decides_and_its_hint_stays_behind():
    good, bad = await condensed(), await condensed("no idea")

    rows = list(to_sft([bad, good], min_reward=1.0, hint=HINT))

    assert len(rows) == len(good.rewrites) + 1
    assert all("The answer is" not in str(one) for row in rows for one in row["messages"])
    assert rows[0]["messages"][2] == {"role": "user", "content": "read all pages"}
    assert rows[0]["tools"] == list(good.tools)


def hinted(hint: dict) -> type[Reader]:
    class Hinted(Reader):
        def start(self):
            document = "\n\n".join(f"Paragraph {n} says " + f"w{n} " * 90 for n in range(12))
            return [{"role": "user", "content": [{"type": "text", "text": f"Read.\n\n{document}"}, hint]}]

    return Hinted


MARKED = {"type": "text", "text": HINT, "hint": True}


@pytest.mark.parametrize("talks", [False, True], ids=["tokens", "text"])
async def test_a_marked_hint_is_shown_to_the_teacher_and_never_condensed(talks):
    engine = Talks("done") if talks else ScriptedEngine(["done"], tokenizer=TOKENIZER)
    record = await play(hinted(MARKED)(), engine, max_context_tokens=8000, condenser=Keywords(at=0.1))
    plain = await play(hinted({"type": "text", "text": f" {HINT}"})())

    (row,) = to_sft([record])
    (named,) = to_sft([plain], hint=HINT)  # a part without the mark

    assert record.rewrites[0].cause == "passages"
    seen = str(engine.heard[0]) if talks else engine.requests[0].prompt_text
    assert HINT in seen
    assert "'hint'" not in seen, "an API does not know the mark"
    assert "page 3" not in str(row["messages"]) + str(named["messages"])
    assert "condensed]" in str(row["messages"])


async def test_a_row_that_still_has_words_of_a_hint_is_left_out_with_a_warning(caplog):
    record = await play(Reader())
    cut = replace(
        record, messages=({"role": "user", "content": "read (The answer is on"}, *record.messages[1:])
    )

    assert list(to_sft([cut], hint=HINT)) == []
    assert "'answer is on' of the hint" in caplog.text


LISBON = (
    "It is about Lisbon, which has the answer 1,234, as you can see. \u7b54\u6848\u662f\u91cc\u65af\u672c"
)
KEPT = [
    "[Keywords: lisbon]",
    "[Condensed: 1234 of 9]",
    "[LISBON's]",
    "[\uff2c\uff49\uff53bon]",
    "\u91cc\u65af\u672c",
]


@pytest.mark.parametrize("kept", KEPT)
async def test_a_row_in_which_a_condenser_kept_a_rare_word_of_a_hint_is_left_out(kept, caplog):
    record = await condensed()
    first = record.rewrites[0]
    written = replace(first, messages=(*first.messages, {"role": "user", "content": kept}))
    changed = replace(record, rewrites=(written, *record.rewrites[1:]))

    whole, left = len(list(to_sft([record], hint=LISBON))), list(to_sft([changed], hint=LISBON))

    assert (
        len(left) == whole - 1 == len(list(to_sft([record], hint="abcdefghij is on 5"))) - 1
    )  # a tool's word
    assert "still has the words" in caplog.text


async def test_episodes_without_tokens_are_condensed_and_exported_too():
    engine = Talks(*PAGES, "done")
    record = await play(Reader(), engine, max_context_tokens=700, condenser=DropToolOutputs(at=0.6))
    assert record.rewrites

    rows = list(to_sft([record]))

    for rewrite in record.rewrites:
        assert list(rewrite.messages) == engine.heard[rewrite.turn]
    assert len(rows) == len(record.rewrites) + 1
    assert rows[-1]["messages"][-1]["content"] == "done"


@pytest.mark.parametrize("hint", ["", HINT])
async def test_an_episode_that_was_not_condensed_is_one_row(hint):
    record = await play(Reader())

    (row,) = to_sft([record], hint=hint)

    assert len(row["messages"]) == len(record.messages)
    assert "weight" not in str(row["messages"])
