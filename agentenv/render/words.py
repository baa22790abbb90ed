"""Encode text word by word from a dictionary, with exactly the ids that the tokenizer gives.

Byte-level tokenizers split a text into words with a pattern and then encode each word for itself, so the
ids of a word are the same wherever it stands. A lookup in a dictionary takes a tenth of the time.

1. It is used only where it is provably equal: the steps of the tokenizer are read from the tokenizer, and
   a step that is not known, a character outside the domain of the translated pattern, or an added token
   that takes spaces with it leaves the whole text to the tokenizer.
2. The ids of a word come from the model of the tokenizer itself, which sees the word as it would in a text.
3. The result is compared with the tokenizer's own: on sample texts at first use, and on some of the calls
   afterwards. One difference ends the use of the dictionary for this tokenizer, with a warning.
4. The memory is bounded: at most two generations of `MAX_WORDS` words of at most `MAX_CHARS` characters,
   which takes at most 40 MB (6 MB with the words of program code).
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias, cast

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Digits

from agentenv.core.visible import logger
from agentenv.render.split_pattern import NOTHING, Untranslatable, char_class, translate

__all__ = ["MAX_CHARS", "MAX_WORDS", "WordEncoder", "byte_alphabet"]

MAX_WORDS = 16_384
MAX_CHARS = 24

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of a ByteLevel step that splits, which is written into the tokenizers package."""

_ONE_CLASS = re.compile(r"\[([^\^\]][^\]]*)\](?:\+|\{1,\d+\})?")

_ASCII = "".join(map(chr, range(128)))
_WIDE = (
    range(0x530),
    range(0x1E00, 0x1F00),
    range(0x2000, 0x2C00),
    range(0x3000, 0x3100),
    range(0xFE0E, 0xFE10),
    range(0xFF00, 0xFFF0),
    range(0x1F300, 0x1F700),
    range(0x1F900, 0x1FA00),
)
"""Characters that occur in texts whose words repeat. Chinese and Japanese have no spaces between words, so
a dictionary has nothing to give there."""
_VARIATION = "\ufe0e\ufe0f"

_CHECK_EVERY = 256
_FIRST_CHECKS = 8

_log = logger(__name__)

_Splitter: TypeAlias = Callable[[str], Iterable[str]]
_Searcher: TypeAlias = Callable[[str], "re.Match[str] | None"]


class WordEncoder:
    """Encodes texts of one tokenizer word by word.

    The tokenizer must not change any more; the sampled comparison notices if it did.
    """

    # Invariant: every word in `_ids` has the ids that the model of the tokenizer gives it.

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._calls = 0
        self._steps = _steps_of(backend)
        self._normalized = _normalizes(backend)
        self._ids = _WordIds(backend.model)
        tokens = backend.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in tokens.items()}
        self._plain, self._late, self._awkward = _patterns_of(tokens.values(), normalized=self._normalized)
        self._ascii = _splitter(self._steps, _ASCII)
        self._on = True

    @classmethod
    def of(cls, backend: Tokenizer) -> WordEncoder | None:
        """Return an encoder that was compared with the tokenizer, or None if it can't be proved equal."""
        try:
            encoder = cls(backend)
        except Untranslatable as error:
            _log.debug("no word dictionary: %s", error)
            return None
        texts = list(_samples())
        answers = backend.encode_batch_fast(texts, add_special_tokens=False)
        if all(encoder.encode(text) in (own.ids, None) for text, own in zip(texts, answers, strict=True)):
            return encoder
        _log.warning("the word dictionary of a tokenizer differs from it and is not used")
        return None

    def checked(self, text: str, whole: Callable[[str], list[int]]) -> list[int]:
        """Return the ids of a text; `whole` encodes a text with the tokenizer itself."""
        ids = self.encode(text) if self._on else None
        if ids is None:
            return whole(text)
        self._calls += 1
        if self._calls > _FIRST_CHECKS and self._calls % _CHECK_EVERY:
            return ids
        own = whole(text)
        if ids != own:
            self._on = False
            _log.warning(
                "the tokenizer and the dictionary of its words differ on %.200r; was the tokenizer changed "
                "after its first use? From now on the tokenizer encodes every text itself",
                text,
            )
        return own

    def encode(self, text: str) -> list[int] | None:
        """Return the ids of a text, or None if only the tokenizer itself can be trusted with it."""
        if self._awkward is not None and self._awkward.search(text):
            return None
        out: list[int] = []
        parts = [text] if self._plain is None else self._plain.split(text)
        for number, part in enumerate(parts):
            if number & 1:
                out.append(self._added[part])
            elif part and not self._encode_normal(part, out):
                return None
        return out

    def _encode_normal(self, text: str, out: list[int]) -> bool:
        """Append the ids of a text between the tokens that are found before it is normalised."""
        parts = [text] if self._late is None else self._late.split(text)
        for number, part in enumerate(parts):
            if number & 1:
                out.append(self._added[part])
                continue
            if part.isascii():
                words = self._ascii(part)
            elif self._wide is not None and self._wide[0](part) is None:
                words = self._wide[1](part)
            else:
                return False
            out += chain.from_iterable(map(self._ids.__getitem__, words))
        return True

    @cached_property
    def _wide(self) -> tuple[_Searcher, _Splitter] | None:
        """How a character outside the wide domain is found, and how texts of the domain are split."""
        domain = _wide_domain(normalized=self._normalized)
        normalizer: Any = self._backend.normalizer
        if self._normalized and normalizer.normalize_str(domain) != domain:
            return None
        try:
            split = _splitter(self._steps, domain)
        except Untranslatable as error:
            _log.debug("no word dictionary beyond ASCII: %s", error)
            return None
        return re.compile(f"[^{char_class(domain)[1:]}").search, split


class _WordIds(dict[str, tuple[int, ...]]):
    """The ids of words; when one generation of words is full, the one before it is forgotten."""

    def __init__(self, model: object) -> None:
        super().__init__()
        self._model: Any = model
        self._older: dict[str, tuple[int, ...]] = {}
        self._table = str.maketrans(dict(enumerate(byte_alphabet())))

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = self._older.get(word)
        if ids is None:
            token = word.encode().decode("latin-1").translate(self._table)
            ids = tuple([part.id for part in self._model.tokenize(token)])
        if len(word) > MAX_CHARS:
            return ids
        if len(self) >= MAX_WORDS:
            self._older = dict(self)
            self.clear()
        self[word] = ids
        return ids


def _steps_of(backend: Tokenizer) -> list[dict[str, Any]]:
    """Return the steps that split a text into words; all of them are of a known kind."""
    model = backend.model
    if not isinstance(model, BPE) or model.dropout:
        raise Untranslatable(f"the model is {type(model).__name__} or drops merges at random")
    if backend.truncation is not None or backend.padding is not None or backend.encode_special_tokens:
        raise Untranslatable("the tokenizer truncates, pads or takes special tokens for text")
    state = _state(backend.pre_tokenizer)
    steps = cast("list[dict[str, Any]]", state.get("pretokenizers", [state]))
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise Untranslatable("the last step is not ByteLevel, or puts a space before the text")
    if not (last["use_regex"] or len(steps) > 1):
        raise Untranslatable("the text is not split into words")
    return steps


def _state(part: object) -> dict[str, Any]:
    """Return the settings of a part of a tokenizer; one that is written in Python has none."""
    if part is None:
        return {}
    try:
        return json.loads(cast("Any", part).__getstate__())
    except Exception as error:
        raise Untranslatable(f"{part!r:.80} has no settings that can be read") from error


def _normalizes(backend: Tokenizer) -> bool:
    """Return whether texts are brought into the normal form NFC.

    Raises:
        Untranslatable: Texts are normalised in another way.
    """
    state = _state(backend.normalizer)
    steps = state.get("normalizers", [state] if state else [])
    if any(step != {"type": "NFC"} for step in steps):
        raise Untranslatable(f"texts are normalised: {state!r:.200}")
    return bool(steps)


def _patterns_of(
    tokens: Iterable[AddedToken], *, normalized: bool
) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None, re.Pattern[str] | None]:
    """Return patterns of the tokens that are found before and after normalising, and of the awkward ones."""
    plain: list[str] = []
    late: list[str] = []
    awkward: list[str] = []
    for token in tokens:
        if token.lstrip or token.rstrip or token.single_word:
            awkward.append(token.content)
        elif token.content:
            (late if token.normalized else plain).append(token.content)
    if normalized and not all(content.isascii() for content in late):
        raise Untranslatable("an added token that is looked for in normalised text is not ASCII")
    return _any_of(plain), _any_of(late), _any_of(awkward)


def _any_of(strings: Sequence[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds the leftmost and longest of the strings, as tokenizers do."""
    longest = sorted(strings, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest)) + ")") if strings else None


def _splitter(steps: Sequence[dict[str, Any]], domain: str) -> _Splitter:
    """Return a function that splits a text of the domain's characters into words."""
    patterns = [pattern for step in steps if (pattern := _pattern(step, domain)) is not None]
    find = [re.compile(pattern).findall for pattern in patterns]
    if len(find) == 1:
        return find[0]

    def split(text: str) -> Iterable[str]:
        words: Iterable[str] = (text,)
        for step in find:
            words = chain.from_iterable(map(step, words))
        return words

    return split


def _pattern(step: dict[str, Any], domain: str) -> str | None:
    """Return the pattern of the pieces of one step, those between its matches included.

    It is None for a step that splits no text of the domain.
    """
    kind = step.get("type")
    if kind == "ByteLevel":
        return _with_gaps(translate(_GPT2, domain)) if step["use_regex"] else None
    if kind == "Digits":
        return _with_gaps(char_class(_digits(domain)) + ("" if step["individual_digits"] else "+"))
    known = kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    if not known or "Regex" not in step["pattern"]:
        raise Untranslatable(f"the step {step!r:.200} is not known")
    pattern = translate(step["pattern"]["Regex"], domain)
    return None if pattern.removesuffix("+") == NOTHING else _with_gaps(pattern)


def _with_gaps(pattern: str) -> str:
    """Return a pattern that also finds the text between two matches, as one piece."""
    if re.match(pattern, ""):
        raise Untranslatable(f"{pattern!r:.200} matches nothing at all")
    if one_class := _ONE_CLASS.fullmatch(pattern):
        return rf"{pattern}|[^{one_class[1]}]+"
    return rf"{pattern}|(?s:.)+?(?={pattern}|\Z)"


def _digits(domain: str) -> str:
    """Return the characters of the domain that a Digits step takes for digits; it is asked itself."""
    runs = Digits(individual_digits=False).pre_tokenize_str("a" + domain)
    return "".join(domain[start - 1 : stop - 1] for _, (start, stop) in runs[1::2])


def _wide_domain(*, normalized: bool) -> str:
    """Return the characters beyond ASCII for which a pattern is translated.

    Where texts are normalised, only characters that no neighbour can change: none that combines, and none
    that Python's version of Unicode does not know yet.
    """
    characters = map(chr, chain.from_iterable(_WIDE))
    return "".join(character for character in characters if not normalized or _stands_alone(character))


def _stands_alone(character: str) -> bool:
    category = unicodedata.category(character)
    combines = category[0] == "M" and character not in _VARIATION
    return category != "Cn" and not combines and unicodedata.is_normalized("NFC", character)


def _samples() -> Iterable[str]:
    """Yield texts that hold every kind of word, the same ones each time."""
    yield _ASCII
    rng = random.Random(0)
    for _ in range(48):
        yield "".join(rng.choice(_SAMPLES) for _ in range(rng.randint(1, 12)))


_SAMPLES = (
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\x0b", "\x1c", "\x00"),
    *("a", "The", "HTTP", "camelCase", "snake_case", "it's", "IT'S", "they'LL", "'", "'d", "x'", " word"),
    *("0", "7", "42", "123", "12345678", "3.14", "1e-5", "0x1F", "2026-11-22", "A1", "1a"),
    *(".", ",", "...", "//", "/a/b", "{}", '{"k": [1]}', "==", "->", "!!", "#", "$x", "%", "&", "@", "~"),
    *("`", "<", ">", "|", "<|", "|>", "\\", "\\n", "_", "__init__", "-", "--", "^", ";", ":", "?", "*", "+"),
)


def byte_alphabet() -> list[str]:
    """Return the character that byte-level BPE uses for each byte value."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]
