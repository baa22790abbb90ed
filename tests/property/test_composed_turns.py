"""Calls run where the model meant them, whatever text and thinking stand around them and whatever is in them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core import CallStatus, text_of
from agentenv.render import ChatTokenizer, Renderer
from agentenv.testing import tool_call_message
from helpers import call_formats as formats
from helpers import chat_cases as cases

FORMATS = {**formats.CALL_FORMATS, **formats.ESCAPED_FORMATS, **formats.LEARNED_FORMATS}
TEMPLATES = {**FORMATS, **cases.trl_templates()}
TEXTS = st.sampled_from(
    ["P", "é漢🙂", "a\nb", "42", '{"a": [1]}', "a < b & c > d", "<think>hm</think>", "<|im_end|>", "x, y=z"]
)
KINDS = {
    "behind text": ("Say. A", "A"),
    "behind text without a space": ("Say.A", "A"),
    "before text": ("A\nSay.", "A"),
    "behind thinking": ("<hm>A", "A"),
    "before thinking": ("A<hm>", "A"),
    "between thinking": ("<hm>A<hm>B", "AB"),
    "in thinking": ("<I could A, but no.>Say.", ""),
    "in thinking and behind it": ("<I could A.>B", "B"),
    "in later thinking": ("Say.<I could A, but no.>Say.", ""),
}
"""How a turn is made of calls A and B, with thinking between brackets, and which of them run."""


def thinking_of(renderer: Renderer) -> tuple[str, str] | None:
    """The tags of thinking that are control tokens, unless the prompt opens thinking."""
    forms, control = renderer._diagnosis.forms, renderer._diagnosis.control.strings
    pairs = [pair for pair in forms.tags if {*pair} <= control.keys()]
    return pairs[0] if pairs and not forms.closes else None


@pytest.mark.parametrize("name", [*cases.FAMILIES, *TEMPLATES])
def test_calls_run_where_they_were_meant(name: str) -> None:
    family = name in cases.FAMILIES
    path = cases.TOKENIZERS / name
    tokenizer = ChatTokenizer.load(path) if family else cases.tokenizer_for(TEMPLATES[name])
    renderer = Renderer(tokenizer, cases.TOOLS)
    tags = thinking_of(renderer)
    native = renderer.report.verdict in {"fast", "history"} and renderer._diagnosis.grammar.whole is None
    if not native or tags is None:
        pytest.skip("calls have no tags of their own, or the prompt opens thinking")

    def behind_thinking(message: dict) -> list[int]:
        """The turn without its stop token, and without the empty thinking that some templates write."""
        ids, closes = renderer.write(message)[:-1], tokenizer.token_id(tags[1])
        return ids[ids.index(closes) + 1 :] if closes in ids else ids

    @settings(max_examples=3, deadline=None, database=None)
    @given(TEXTS, TEXTS)
    def check(first: str, second: str) -> None:
        asked = {"A": {"city": first, "n": 1}, "B": {"city": second, "n": 2}}
        written = {
            key: behind_thinking(tool_call_message("get_weather", **values)) for key, values in asked.items()
        }
        parts = {**written, **{sign: tokenizer.encode(tag) for sign, tag in zip("<>", tags, strict=True)}}
        for kind, (turn, run) in KINDS.items():
            ids = [token for sign in turn for token in parts.get(sign) or tokenizer.encode(sign)]

            parsed = renderer.parse([*ids, renderer.stop_token_ids[0]])

            live = [json.loads(call.arguments) for call in parsed.tool_calls if call.status is CallStatus.OK]
            assert live == [asked[key] for key in run], (kind, renderer.decode(ids))
            assert text_of(parsed.message).split() == ["Say."] * turn.count("Say."), (
                kind,
                renderer.decode(ids),
            )
            assert not parsed.errors, (kind, renderer.decode(ids))

    check()
