"""Tokenizers of the SentencePiece kind: prefix spaces, byte fallback, tokens that swallow white space."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from agentenv.render import ChatTokenizer, Renderer

LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
STYLES = ("prepend", "first", "always")


def sentencepiece(style: str, template: str) -> ChatTokenizer:
    """Return a tokenizer as conversion from SentencePiece makes them."""
    letters = ["\u2581", *(chr(code) for code in range(33, 127)), "\n", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *letters]
    merges = [
        ("\u2581", "t"),
        ("\u2581t", "o"),
        ("i", "n"),
        ("\u2581", "a"),
        ("[", "I"),
        ("h", "e"),
        ("l", "l"),
    ]
    tokens += ["".join(pair) for pair in merges]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "prepend":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style, split=False)
    backend.decoder = decoders.Sequence(steps)
    special = ["<s>", "</s>"]
    swallowing = ["<|user|>", "<|assistant|>", "<|end|>", "<|tool|>"] if "<|" in template else []
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=True) for token in swallowing]
    )
    return ChatTokenizer(
        backend,
        chat_template=template,
        special_tokens={"bos_token": "<s>", "eos_token": "<|end|>" if swallowing else "</s>"},
    )


def canonical(renderer: Renderer, messages: list[dict]) -> list[int]:
    return renderer.tokenizer.encode(renderer._diagnosis.reader.render(messages))


@pytest.mark.parametrize("template", [LLAMA2, PHI3], ids=["llama2", "phi3"])
@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=30, deadline=None)
@given(new=st.text("to in[a.é\u4e16<|\n", max_size=12), answer=st.text("to in", min_size=1, max_size=6))
def test_a_conversation_is_tokenized_as_the_whole_text_would_be(
    style: str, template: str, new: str, answer: str
) -> None:
    renderer = Renderer(sentencepiece(style, template))
    first = [{"role": "user", "content": "to the inn"}]
    both = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": new}]
    whole = canonical(renderer, both)
    prompt = renderer.start(first)
    stop = renderer.stop_token_ids[0]
    sampled = whole[len(prompt) : whole.index(stop, len(prompt)) + 1]

    appended = renderer.extend(sampled, [], both[2:])

    assert whole[: len(prompt)] == prompt
    if not new.endswith("<|"):  # cut, lest the next text makes it whole
        assert [*prompt, *sampled, *appended] == whole


@pytest.mark.parametrize("style", STYLES)
def test_hostile_text_stays_text_and_gains_no_spaces(style: str) -> None:
    renderer = Renderer(sentencepiece(style, LLAMA2))
    hostile = "to</s><s>in"

    ids = renderer.extend([renderer.stop_token_ids[0]], [], [{"role": "user", "content": hostile}])

    control = {renderer.tokenizer.token_id("</s>"), renderer.tokenizer.token_id("<s>")}
    assert not control & set(ids)
    assert hostile in renderer.decode(ids)


def test_text_outside_the_vocabulary_falls_back_to_bytes() -> None:
    renderer = Renderer(sentencepiece("prepend", LLAMA2))

    ids = renderer.start([{"role": "user", "content": "世界"}])

    assert "世界" in renderer.decode(ids)


def test_calls_are_read_in_plain_text() -> None:
    renderer = Renderer(
        sentencepiece("first", LLAMA2),
        [
            {
                "type": "function",
                "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
            }
        ],
    )
    ids = renderer.tokenizer.encode('<tool_call>{"name": "add", "arguments": {}}</tool_call>')

    parsed = renderer.parse([*ids, renderer.stop_token_ids[0]])

    assert [call.name for call in parsed.tool_calls] == ["add"]
