"""Whatever the text, the dictionary of words gives the tokenizer's own ids or none."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agentenv.render import ChatTokenizer
from agentenv.render import words as words_module
from agentenv.render.words import WordEncoder
from helpers import chat_cases as cases

DOMAIN = words_module._wide_domain(normalized=False)
CONTROL = ("<|im_end|>", "<|im_start|>", "<\uff5cUser\uff5c>", "[INST]", "<think>", "<|", "|>", "<tool_call>")

PARTS = st.one_of(
    st.sampled_from(words_module._SAMPLES),
    st.sampled_from(CONTROL),
    st.text(st.characters(max_codepoint=127), max_size=12),
    st.text(st.sampled_from(DOMAIN), max_size=8),
    st.text(max_size=4),
)


@cache
def loaded(family: str) -> tuple[Tokenizer, WordEncoder]:
    backend = ChatTokenizer.load(cases.TOKENIZERS / family).backend
    encoder = WordEncoder.of(backend)
    assert encoder is not None
    return backend, encoder


@pytest.mark.parametrize("family", cases.FAMILIES)
@given(parts=st.lists(PARTS, max_size=12))
def test_any_text_has_the_tokenizers_ids_or_is_left_to_it(family: str, parts: list[str]) -> None:
    backend, encoder = loaded(family)
    text = "".join(parts)

    ids = encoder.encode(text)

    assert ids is None or ids == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("family", cases.FAMILIES)
@given(text=st.text(st.characters(max_codepoint=127)))
def test_ascii_is_never_left_to_the_tokenizer(family: str, text: str) -> None:
    backend, encoder = loaded(family)

    assert encoder.encode(text) == backend.encode(text, add_special_tokens=False).ids
