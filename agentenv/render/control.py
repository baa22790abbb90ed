"""Find the control strings of a tokenizer, and keep untrusted text from becoming control tokens.

A control string is one that the tokenizer maps to a single id with a meaning of its own: `<|im_end|>`,
`<tool_call>`, `[INST]`. Untrusted text may contain such strings. Before it is rendered, a private-use
character (the mark) is inserted after the first character of each of them. After rendering, the text
is split at the marks and its pieces are encoded one by one, so that no control string is encoded as
a whole. The mark itself is never encoded, so the model reads the same characters.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias, cast

from agentenv.core.errors import RenderError

if TYPE_CHECKING:
    from agentenv.render.tokenizer import ChatTokenizer

__all__ = ["SENTINEL", "WORDS", "ControlSet", "Marker", "Neutraliser", "clean_unicode"]

SENTINEL = "SENTINELq7Zk3vXw9"
"""Placeholder for what the model wrote; it has only letters and digits, which no template changes."""

WORDS = frozenset(
    [
        "role",
        "content",
        "reasoning_content",
        "tool_calls",
        "tool_call_id",
        "id",
        "type",
        "function",
        "name",
        "arguments",
        "description",
        "parameters",
        "strict",
        "properties",
        "required",
        "items",
        "enum",
        "const",
        "default",
        "title",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "$ref",
        "$defs",
        "definitions",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "prefixItems",
        "contains",
        "minItems",
        "maxItems",
        "uniqueItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "examples",
        "nullable",
        "return",
        "returns",
        "response",
    ]
)
"""Keys of messages and schemas that templates ask for by name; they never change."""

_PRIVATE_USE = (range(0xE0F0, 0xE100), range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
_PIPES = re.compile(r"<[|\uff5c].*[|\uff5c]>\Z", re.DOTALL)


class ControlSet:
    """The control strings of a tokenizer under one template."""

    __slots__ = (
        "_begins",
        "_edges",
        "_first",
        "_inside",
        "_joined",
        "_last",
        "_longest",
        "_normalized",
        "_pattern",
        "_prefixes",
        "_rest_lengths",
        "_rest_prefixes",
        "_rests",
        "_single",
        "reserved",
        "strings",
    )

    # Invariant: everything except `_inside` is computed once from `strings` and never changes afterwards.

    def __init__(self, strings: Mapping[str, int], *, normalized: bool = False, template: str = "") -> None:
        self.strings = dict(strings)
        # No mark fits into a string of one character, so it is replaced and not taken apart.
        self._single = {ord(string): "\ufffd" for string in self.strings if len(string) == 1}
        self.reserved = frozenset(template).union(*self.strings)
        """Characters that the template itself may write, so none of them can be a mark."""
        # Without control strings the pattern matches nothing.
        self._pattern = re.compile(_trie_pattern(self.strings) if self.strings else r"(?!)")
        self._normalized = normalized
        # One character alone begins far too much text to be cut off each time; `may_join` cares for it.
        self._prefixes = {string[:length] for string in self.strings for length in range(2, len(string))}
        self._longest = max(map(len, self._prefixes), default=0)
        self._first = tuple(sorted({string[0] for string in self.strings}))
        self._last = frozenset(string[-1] for string in self.strings)
        self._begins = _any_character(self._first)
        self._edges = _any_character({*self._first, *self._last})
        # Line breaks around each string tell its start and its end in a search of the whole.
        self._joined = "".join(f"\n{string}\n" for string in self.strings).casefold()
        self._rests = {string[1:] for string in self.strings if len(string) > 1}
        self._rest_lengths = sorted({len(rest) for rest in self._rests})
        self._rest_prefixes = {rest[:length] for rest in self._rests for length in range(1, len(rest))}
        self._inside: dict[str, tuple[tuple[int, str], ...]] = {}

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, template: str) -> ControlSet:
        """Collect the control strings: all special tokens, and added tokens that look like markup.

        A token that is not flagged special is a control token if it has the form `<|...|>`, or if it
        looks like other markup and either stands in the template or names tools or thinking. Other added
        tokens (line breaks and HTML tags in some vocabularies) are plain text.
        """
        strings: dict[str, int] = {}
        normalized = False
        for token_id, token in tokenizer.added_tokens.items():
            if token.content and (token.special or _is_control_markup(token.content, template)):
                strings[token.content] = token_id
                normalized |= token.normalized
        normalized = normalized and tokenizer.backend.normalizer is not None
        return cls(strings, normalized=normalized, template=template)

    @property
    def needs_normalized_check(self) -> bool:
        """True if the tokenizer's normaliser can turn another string into a control string."""
        return self._normalized

    def search(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Return position and text of the next control string, matched as a tokenizer matches them."""
        match = self._pattern.search(text, start)
        return None if match is None else (match.start(), match.group())

    def find(self, text: str) -> list[str]:
        """Return the control strings of a text in order, matched as a tokenizer matches them."""
        return self._pattern.findall(text)

    def positions(self, text: str) -> list[tuple[int, str]]:
        """Return what `find` returns, each string with its position."""
        return [(match.start(), match.group()) for match in self._pattern.finditer(text)]

    def clean(self, text: str) -> str:
        """Return text that can be encoded; U+FFFD replaces control strings of one character."""
        text = clean_unicode(text)
        return text.translate(self._single) if self._single else text

    def may_begin(self, text: str) -> bool:
        """Return False if no character of the text could begin a control string; this check is fast."""
        return self._begins.search(text) is not None

    def inside(self, tag: str) -> tuple[tuple[int, str], ...]:
        """Return `(offset, string)` for each control string inside a tag."""
        strings = self._inside.get(tag)
        if strings is None:
            strings = tuple((tag.index(string), string) for string in self.strings if string in tag)
            self._inside[tag] = strings
        return strings

    def starts(self, text: str) -> list[int]:
        """Return every position where a control string begins, overlapping ones included."""
        positions: list[int] = []
        match = self._pattern.search(text) if self.may_begin(text) else None
        while match is not None:
            positions.append(match.start())
            # Control strings may overlap, and a mark in one of them can leave another one whole.
            match = self._pattern.search(text, match.start() + 1)
        return positions

    def partial_end(self, text: str) -> int:
        """Return how many characters (at least two, else 0) at the end of the text begin a control string."""
        end = text[-self._longest :] if self._longest else ""
        lengths = range(len(end), 1, -1) if self.may_begin(end) else ()
        return next((length for length in lengths if text[-length:] in self._prefixes), 0)

    def completes(self, text: str) -> bool:
        """Return True if the text begins with a control string that lacks its first character."""
        # The set of prefixes has the first characters of all rests, so most texts are looked up once.
        if text[:1] not in self._rest_prefixes:
            return False
        return any(text[:length] in self._rests for length in self._rest_lengths)

    def may_join(self, texts: Sequence[str]) -> bool:
        """Return True if one text may end with the start of a control string that another completes."""
        # A text that is only a part of a rest can be the middle of a string whose ends are two other texts.
        return not self._rest_prefixes.isdisjoint(texts) and any(map(self.ends_with_first, texts))

    def may_be_part(self, text: str) -> bool:
        """Return False if no control string can be made with the text and what a template writes beside it.

        Letters are compared without case, because templates may change it.
        """
        # Such a text has the start or the end of a control string in it, or lies within one.
        return self._edges.search(text) is not None or self._is_within(text)

    def overlaps(self, text: str) -> bool:
        """Return True if a control string contains the text, is in it, or stands across one of its ends."""
        if self._is_within(text) or text in self:
            return True
        text = text.casefold()
        for length in range(1, min(len(text), self._longest) + 1):
            if f"\n{text[-length:]}" in self._joined or f"{text[:length]}\n" in self._joined:
                return True
        return False

    def _is_within(self, text: str) -> bool:
        # Strings are one longer than their longest true prefix.
        return len(text) <= self._longest + 1 and text.casefold() in self._joined

    def is_last(self, character: str) -> bool:
        """Return True if a control string ends with the character."""
        return character in self._last

    def ends_with_first(self, text: str) -> bool:
        """Return True if the last character could begin a control string."""
        return text.endswith(self._first)

    def __contains__(self, text: str) -> bool:
        return self._pattern.search(text) is not None


class Marker(ABC):
    """Inserts marks into the untrusted strings of one render, all with the same mark character.

    The mark is a private-use character that none of the strings contains, neither as such nor as a JSON
    escape, so removing it loses nothing.

    Raises:
        RenderError: The strings contain every private-use character.
    """

    __slots__ = ("_control", "_escapes", "mark", "used")

    def __init__(self, control: ControlSet, texts: Iterable[str]) -> None:
        self._control = control
        self.mark = _free_mark("".join(texts), control.reserved)
        self._escapes = _escapes(self.mark)
        self.used = False
        """True once a mark was inserted; only then must the rendered text be split."""

    @abstractmethod
    def text(self, text: str) -> str:
        """Return the text with marks inserted."""

    def message(self, message: Mapping[str, object]) -> dict[str, object]:
        """Return a message in which all strings have their marks."""
        return cast("dict[str, object]", self.value(message))

    def value(self, value: object) -> object:
        """Return a JSON value in which all strings, keys included, have their marks."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, (dict, Mapping)):
            items = cast("Mapping[object, object]", value).items()
            return {
                key if key in WORDS or not isinstance(key, str) else self.text(key): self.value(item)
                for key, item in items
            }
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in cast("list[object]", value)]
        return value

    def split(self, rendered: str) -> list[str]:
        """Split a rendered text at the marks, also at marks that a template wrote as escapes.

        A sentinel in untrusted text was marked only so that it is not mistaken for ours; its mark is removed.
        """
        if not self.used:
            return [rendered]
        rendered = rendered.replace(SENTINEL[:1] + self.mark + SENTINEL[1:], SENTINEL)
        # `tojson` and Python's own notation write the mark as an escape, which stands for the same character.
        for escape in self._escapes:
            if escape in rendered:
                rendered = rendered.replace(escape, self.mark)
        return rendered.split(self.mark)


class Neutraliser(Marker):
    """Inserts marks into control strings, and wherever two texts could form one."""

    __slots__ = ("_may_join", "_tokenizer")

    def __init__(self, control: ControlSet, tokenizer: ChatTokenizer, texts: Iterable[str]) -> None:
        texts = list(texts)
        super().__init__(control, texts)
        self._tokenizer = tokenizer
        self._may_join = control.may_join(texts)

    def text(self, text: str) -> str:
        """Return the text with marks inserted; a text without control strings is returned unchanged."""
        completes = self._control.completes(text)
        # Most texts end here: ASCII needs no cleaning, and nothing in them begins or ends a control string.
        if not completes and text.isascii() and SENTINEL not in text and not self._control.may_begin(text):
            return text
        text = self._control.clean(text)
        # Each cut is inside a string that could become a control string, either in this text or together
        # with another untrusted text that is rendered directly before or after it.
        cuts = [position + 1 for position in self._control.starts(text)]
        if completes:
            cuts.append(1)
        if self._may_join and self._control.ends_with_first(text):
            cuts.append(len(text))
        if SENTINEL in text:
            cuts += [match.end() for match in re.finditer(SENTINEL[:1] + f"(?={SENTINEL[1:]})", text)]
        if partial := self._control.partial_end(text):
            cuts.append(len(text) - partial + 1)  # another untrusted text may complete it
        if not cuts:
            return self._checked(text)
        self.used = True
        cuts = sorted(set(cuts))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return self.mark.join(self._checked(piece) for piece in pieces)

    def _checked(self, piece: str) -> str:
        """Put marks between all characters of a piece that the normaliser would make a control string."""
        # No normal form changes ASCII.
        if not self._control.needs_normalized_check or piece.isascii():
            return piece
        normalizer = self._tokenizer.backend.normalizer
        if normalizer is None or normalizer.normalize_str(piece) not in self._control:
            return piece
        self.used = True
        return self.mark.join(piece)


def _free_mark(joined: str, reserved: Container[str]) -> str:
    # A text with the digits of the escape that JSON or Python writes for a mark would be split at them, too.
    for mark in map(chr, chain.from_iterable(_PRIVATE_USE)):
        if (
            mark not in joined
            and mark not in reserved
            and not any(escape[-4:] in joined for escape in _escapes(mark))
        ):
            return mark
    raise RenderError(
        "the messages and tools contain every private-use character of Unicode, so none is left to mark text",
        remedy="remove private-use characters from the text",
    )


@lru_cache(maxsize=64)
def _escapes(mark: str) -> frozenset[str]:
    """Return how JSON and Python's own notation write the mark if they escape it; each ends in hex digits."""
    return frozenset({json.dumps(mark)[1:-1], repr(mark)[1:-1]})


def clean_unicode(text: str) -> str:
    """Return text that can be encoded: surrogate pairs are joined, lone surrogates become U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _is_control_markup(content: str, template: str) -> bool:
    if _PIPES.match(content):
        return True
    if len(content) < 3 or content[0] not in "<[]" or content[-1] not in ">[]":
        return False
    lowered = content.lower()
    return "tool" in lowered or "think" in lowered or content in template


def _any_character(characters: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of the characters, and nothing if there are none."""
    return re.compile("|".join(map(re.escape, characters)) or r"(?!)")


_Trie: TypeAlias = "dict[str, _Trie]"
"""By character, what may follow it; an empty key stands for the end of a string."""


def _trie_pattern(strings: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of the strings at each position."""
    root: _Trie = {}
    for string in strings:
        node = root
        for character in string:
            node = node.setdefault(character, {})
        node[""] = {}
    return _trie_branch(root)


def _trie_branch(node: _Trie) -> str:
    prefix = ""
    while len(node) == 1 and "" not in node:
        ((character, node),) = node.items()
        prefix += re.escape(character)
    ends = "" in node
    branches = [re.escape(key) + _trie_branch(child) for key, child in node.items() if key]
    if not branches:
        return prefix
    group = "(?:" + "|".join(branches) + ")"
    return prefix + group + ("?" if ends else "")
