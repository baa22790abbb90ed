"""The dictionary of words gives the tokenizer's own ids, or leaves the text to the tokenizer."""

from __future__ import annotations

import json
import logging
import random
import re
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from agentenv.render import ChatTokenizer, byte_tokenizer
from agentenv.render import words as words_module
from agentenv.render.split_pattern import Untranslatable, translate
from agentenv.render.words import WordEncoder
from helpers import chat_cases as cases

ROOT = Path(__file__).parents[3]


def loaded(family: str = "smollm2") -> Tokenizer:
    """A tokenizer of its own, for tests that change it."""
    return Tokenizer.from_file(str(cases.TOKENIZERS / family / "tokenizer.json"))


@cache
def words_of(family: str) -> tuple[Tokenizer, WordEncoder]:
    """A tokenizer and its dictionary, for all tests that only read them."""
    backend = loaded(family)
    return backend, WordEncoder.of(backend)


def own_ids(backend: Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


def with_steps(*steps: object) -> Tokenizer:
    backend = loaded()
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    return backend


def byte_level(**settings: bool) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **settings})


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_every_real_tokenizer_has_a_dictionary(family: str) -> None:
    _, encoder = words_of(family)

    assert encoder is not None
    assert encoder.encode("Grüße naïve\u2013 🙂 и так далее") is not None
    assert encoder.encode("漢字") is None
    assert encoder.encode("\ud800") is None
    assert encoder.encode("") == []


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_source_code_prose_and_data_have_the_tokenizers_ids(family: str) -> None:
    backend, encoder = words_of(family)
    files = [*sorted(ROOT.glob("agentenv/render/*.py"))[:6], ROOT / "README.md", ROOT / "pyproject.toml"]
    for file in files:
        text = file.read_text(encoding="utf-8").replace("\n", "\r\n" if file.suffix == ".toml" else "\n")
        for size in (61, 4000):
            for start in range(0, min(len(text), 12_000), size):
                piece = text[start : start + size]
                assert encoder.encode(piece) in (own_ids(backend, piece), None)


@pytest.mark.parametrize("share", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_every_character_of_the_domain_splits_as_in_the_tokenizer(family: str, share: int) -> None:
    backend, encoder = words_of(family)
    domain = words_module._wide_domain(normalized=backend.normalizer is not None and family == "qwen3")
    shuffled = random.Random(1).sample(domain, len(domain) // share)
    patterns = ("a{0}b {0} 1{0}2\n{0}{1} {1}{0}  {0}A'{0}", "{1}{0}{0}\n\n{0}.{1}'S{0}1")

    for before, character in pairwise(shuffled):
        for pattern in patterns:
            text = pattern.format(character, before)
            assert encoder.encode(text) == own_ids(backend, text), text


@pytest.mark.parametrize("family", cases.FAMILIES)
@pytest.mark.parametrize(
    "text",
    [
        " " * 3000 + "x" + "\n" * 3000 + " " * 3000,
        "a" * 5000 + "A" * 5000 + "1" * 5000,
        "".join(f"{'aA'[i % 2]}" for i in range(6000)),
        "'" * 2000 + "s" + "!" * 2000,
        "-" * 3000 + "\r\n" * 500,
        "\x1c\x1d\x1e\x1f\x85\xa0\u2028\u3000" * 20,
        "it's IT'S it\u017f's 'Re 'LL \u212a '\u017f",
        "e\u0301 \u1100\u1161 \u0958",
        "<|im_start|<|im_start|>|im_end|><|im_end|><|endoftext|><\uff5cUser\uff5c>[INST][/INST]",
        "<|im_end|> x<|im_end|>\u0338 a",
        "\ufeff\u200b\u200d\ufe0f",
    ],
)
def test_hostile_texts_have_the_tokenizers_ids_or_are_left_to_it(family: str, text: str) -> None:
    backend, encoder = words_of(family)

    assert encoder.encode(text) in (own_ids(backend, text), None)


STEPS = {
    "single digits": [pre_tokenizers.Digits(individual_digits=True), byte_level()],
    "runs of digits": [pre_tokenizers.Digits(individual_digits=False), byte_level()],
    "a pattern with gaps": [
        pre_tokenizers.Split(Regex(r"\d+[a-c]|\s{2,3}(?=x)"), "isolated"),
        byte_level(use_regex=False),
    ],
    "two patterns": [
        pre_tokenizers.Split(Regex(r"[\p{Lu}]{2,}"), "isolated"),
        pre_tokenizers.Split(Regex(r"\w+(?!\w)|[^\w. ]+\."), "isolated"),
        byte_level(),
    ],
    "a folded class": [
        pre_tokenizers.Split(Regex(r"'(?i:[sdmt]|ll|ve|re)|(\p{L}+)| ?\p{P}+"), "isolated"),
        byte_level(use_regex=False),
    ],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_other_ways_to_split_are_translated_exactly(steps: list[object]) -> None:
    backend = with_steps(*steps)
    encoder = WordEncoder.of(backend)
    rng = random.Random(2)
    parts = [*words_module._SAMPLES, "é", "½", "²", "\u0416", "ÀB", "x", "12b", "ß", "\u017f"]

    assert encoder is not None
    for _ in range(300):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(1, 9)))
        assert encoder.encode(text) == own_ids(backend, text)


REFUSED = {
    "no split": [byte_level(use_regex=False)],
    "a space in front": [byte_level(add_prefix_space=True)],
    "another step": [pre_tokenizers.Punctuation(), byte_level()],
    "matches removed": [pre_tokenizers.Split(Regex(r"\s"), "removed"), byte_level()],
    "a plain string": [pre_tokenizers.Split("a", "isolated"), byte_level()],
    "a lazy quantifier": [pre_tokenizers.Split(Regex(r"a+?b"), "isolated"), byte_level()],
    "a possessive quantifier": [pre_tokenizers.Split(Regex(r"a++"), "isolated"), byte_level()],
    "a lookbehind": [pre_tokenizers.Split(Regex(r"(?<=a)b"), "isolated"), byte_level()],
    "an intersection": [pre_tokenizers.Split(Regex(r"[a-z&&[^b]]"), "isolated"), byte_level()],
    "any character": [pre_tokenizers.Split(Regex(r"a."), "isolated"), byte_level()],
    "an empty match": [pre_tokenizers.Split(Regex(r"a*"), "isolated"), byte_level()],
    "a reference": [pre_tokenizers.Split(Regex(r"(a)\1"), "isolated"), byte_level()],
}


@pytest.mark.parametrize("steps", REFUSED.values(), ids=REFUSED)
def test_a_split_that_cannot_be_proved_equal_is_refused(steps: list[object]) -> None:
    assert WordEncoder.of(with_steps(*steps)) is None


@pytest.mark.parametrize("pattern", ["(a", "a)", "a{2}{3}", "(?i:ss)", "\\b", "[[:alpha:]]", "^a", "(?x)a"])
def test_a_pattern_that_engines_may_read_differently_is_refused(pattern: str) -> None:
    with pytest.raises(Untranslatable):
        translate(pattern, "aAsSß")


def test_other_models_normalisers_and_limits_are_refused() -> None:
    lowered, cut, random_merges, special = loaded(), loaded(), loaded(), loaded()
    lowered.normalizer = normalizers.Lowercase()
    cut.enable_truncation(8)
    random_merges.model.dropout = 0.1
    special.encode_special_tokens = True

    for backend in (lowered, cut, random_merges, special, byte_tokenizer().backend):
        assert WordEncoder.of(backend) is None


def test_added_tokens_are_found_as_the_tokenizer_finds_them() -> None:
    backend = loaded("qwen3")
    backend.add_tokens(
        [
            AddedToken("<a>", normalized=False),
            AddedToken("<a><b>", normalized=False),
            AddedToken("b><c", normalized=True),
            AddedToken("<left>", lstrip=True, normalized=False),
            AddedToken("word", single_word=True, normalized=False),
        ]
    )
    encoder = WordEncoder.of(backend)

    for text in ("<a><a><b><c>", "x<a>b><c>", "<a><b", "é<a>é b><c"):
        assert encoder.encode(text) == own_ids(backend, text)
    assert encoder.encode("a  <left> b") is None
    assert encoder.encode("a word b") is None


def test_a_normalised_token_beyond_ascii_is_refused_where_texts_are_normalised() -> None:
    backend = loaded("qwen3")
    backend.add_tokens([AddedToken("é!", normalized=True)])

    assert WordEncoder.of(backend) is None


def test_the_tokenizer_without_a_dictionary_still_encodes() -> None:
    tokenizer = ChatTokenizer(with_steps(pre_tokenizers.Punctuation(), byte_level()))

    assert tokenizer.encode("a, b") == own_ids(tokenizer.backend, "a, b")
    assert tokenizer._words is None


def test_a_tokenizer_that_was_changed_later_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words_module, "_FIRST_CHECKS", 0)
    monkeypatch.setattr(words_module, "_CHECK_EVERY", 3)
    tokenizer = ChatTokenizer(loaded())
    tokenizer.encode("a new token")
    tokenizer.backend.add_tokens(["new"])

    with caplog.at_level(logging.WARNING):
        answers = [tokenizer.encode("a new token") for _ in range(4)]

    assert answers[1:] == [own_ids(tokenizer.backend, "a new token")] * 3
    assert len(caplog.records) == 1
    assert "'a new token'; was the tokenizer changed after its first use?" in caplog.text


def test_a_dictionary_that_differs_from_its_tokenizer_is_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words_module, "_GPT2", r"\p{L}+|\s+|[^\s\p{L}]+")

    with caplog.at_level(logging.WARNING):
        assert WordEncoder.of(loaded()) is None

    assert "differs from it and is not used" in caplog.text


def test_the_dictionary_is_bounded_and_keeps_words_that_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_module, "MAX_WORDS", 50)
    backend = loaded()
    encoder = WordEncoder.of(backend)
    ids = encoder._ids

    for number in range(400):
        text = f" kept w{'abcdefghij'[number % 10]}{'abcdefghij'[number // 10 % 10]}x{number} {'y' * 65}"
        assert encoder.encode(text) == own_ids(backend, text)
        assert len(ids) <= 50
        assert len(ids._older) <= 50
        assert " kept" in ids or " kept" in ids._older
        assert not any(len(word) > words_module.MAX_CHARS for word in ids)


def test_a_full_dictionary_of_the_longest_words_takes_at_most_40_megabytes() -> None:
    ids = WordEncoder.of(loaded())._ids
    rng = random.Random(3)
    words = [rng.randbytes(words_module.MAX_CHARS // 2).hex() for _ in range(200)]
    sizes = [sys.getsizeof(word) + sys.getsizeof(ids[word]) + 28 * len(ids[word]) for word in words]
    slots = sys.getsizeof(dict.fromkeys(range(words_module.MAX_WORDS)))

    assert 2 * (words_module.MAX_WORDS * sum(sizes) / 200 + slots) < 40e6


def test_equal_words_share_their_integers() -> None:
    encoder = WordEncoder.of(loaded())

    first, second = encoder.encode(" tokenizer")[-1], encoder.encode("a tokenizer")[-1]

    assert first > 256
    assert first is second


def test_settings_are_read_without_the_vocabulary() -> None:
    """`to_str` of a tokenizer of 150,000 tokens takes a tenth of a second."""
    state = words_module._state(loaded("qwen3").pre_tokenizer)

    assert json.dumps(state).count("ByteLevel") == 1
    assert re.search(r"\\p\{L\}", json.dumps(state))
    assert words_module._state(None) == {}
    with pytest.raises(Untranslatable, match="no settings that can be read"):
        words_module._state(decoders)
