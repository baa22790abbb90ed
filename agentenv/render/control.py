"""Find the control strings of a tokenizer, and keep untrusted text from becoming control tokens.

A control string is one that the tokenizer maps to a single id with a meaning of its own: `<|im_end|>`,
`<tool_call>`, `[INST]`. Untrusted text may contain such strings. Before it is rendered, a private-use
character (the mark) is inserted after the first character of each of them. After rendering, the text
is split at the marks and its pieces are encoded one by one, so that no control string is encoded as
a whole. The mark itself is never encoded, so the model reads the same characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    from agentenv.render.tokenizer import ChatTokenizer

__all__ = ["SENTINEL", "ControlSet", "Neutraliser", "clean_unicode"]

SENTINEL = "SENTINELq7Zk3vXw9"
"""Placeholder for what the model wrote; it has only letters and digits, which no template changes."""

_MARKS = tuple(chr(code) for code in (*range(0xE0F0, 0xE100), *range(0xF0E00, 0xF0E40)))
_PIPES = re.compile(r"<[|\uff5c].*[|\uff5c]>\Z", re.DOTALL)


class ControlSet:
    """The control strings of a tokenizer under one template."""

    __slots__ = (
        "_first",
        "_inside",
        "_longest",
        "_normalized",
        "_pattern",
        "_prefixes",
        "_rest_lengths",
        "_rest_prefixes",
        "_rests",
        "ids",
        "strings",
    )

    # Invariant: everything except `_inside` is computed once from `strings` and never changes afterwards.

    def __init__(self, strings: Mapping[str, int], *, normalized: bool = False) -> None:
        self.strings = dict(strings)
        self.ids = frozenset(self.strings.values())
        self._pattern = re.compile(_trie_pattern(self.strings)) if self.strings else None
        self._normalized = normalized
        self._prefixes = {string[:length] for string in self.strings for length in range(2, len(string))}
        self._longest = max(map(len, self._prefixes), default=0)
        self._first = tuple(sorted({string[0] for string in self.strings}))
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
        return cls(strings, normalized=normalized and tokenizer.backend.normalizer is not None)

    @property
    def needs_normalized_check(self) -> bool:
        """True if the tokenizer's normaliser can turn another string into a control string."""
        return self._normalized

    def finditer(self, text: str, start: int = 0) -> Iterator[tuple[int, str]]:
        """Yield `(position, string)` for each control string, matched as a tokenizer matches them."""
        if self._pattern is not None:
            for match in self._pattern.finditer(text, start):
                yield match.start(), match.group()

    def may_begin(self, text: str) -> bool:
        """Return False if no character of the text could begin a control string; this check is fast."""
        return any(character in text for character in self._first)

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
        if self._pattern is None or not self.may_begin(text):
            return positions
        match = self._pattern.search(text)
        while match is not None:
            positions.append(match.start())
            # Control strings may overlap, and a mark in one of them can leave another one whole.
            match = self._pattern.search(text, match.start() + 1)
        return positions

    def partial_end(self, text: str) -> int:
        """Return how many characters (at least two, else 0) at the end of the text begin a control string."""
        end = text[-self._longest :] if self._longest else ""
        if not self.may_begin(end):
            return 0
        for length in range(len(end), 1, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0

    def completes(self, text: str) -> bool:
        """Return True if the text begins with a control string that lacks its first character."""
        return text[:1] in self._rest_prefixes and any(
            text[:length] in self._rests for length in self._rest_lengths
        )

    def may_join(self, texts: Sequence[str]) -> bool:
        """Return True if one text may end with the start of a control string that another completes."""
        return any(text.endswith(self._first) for text in texts) and not self._rest_prefixes.isdisjoint(texts)

    def ends_with_first(self, text: str) -> bool:
        """Return True if the last character could begin a control string."""
        return text.endswith(self._first)

    def __contains__(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.search(text) is not None


class Neutraliser:
    """Inserts marks into the untrusted strings of one render, all with the same mark character.

    The mark is a private-use character that none of the strings contains, so removing it loses nothing.
    """

    __slots__ = ("_control", "_may_join", "_tokenizer", "mark", "used")

    def __init__(self, control: ControlSet, tokenizer: ChatTokenizer, texts: Iterable[str]) -> None:
        self._control = control
        self._tokenizer = tokenizer
        texts = list(texts)
        self._may_join = control.may_join(texts)
        joined = "".join(texts)
        self.mark = next((mark for mark in _MARKS if mark not in joined), _MARKS[-1])
        self.used = False
        """True once a mark was inserted; only then must the rendered text be split."""

    def text(self, text: str) -> str:
        """Return the text with marks inserted; a text without control strings is returned unchanged."""
        completes = self._control.completes(text)
        if not completes and text.isascii() and SENTINEL not in text and not self._control.may_begin(text):
            return text
        text = clean_unicode(text)
        if self.mark in text:  # this happens only if the texts contain every candidate for the mark
            text = text.replace(self.mark, "\ufffd")
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

    def value(self, value: object) -> object:
        """Return a JSON value in which all strings, keys included, have their marks."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, (dict, Mapping)):
            items = cast("Mapping[object, object]", value).items()
            return {self.text(key) if isinstance(key, str) else key: self.value(item) for key, item in items}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in cast("list[object]", value)]
        return value

    def split(self, rendered: str) -> list[str]:
        """Split a rendered text at the marks, also at marks that a template wrote as JSON escapes.

        A sentinel in untrusted text was marked only so that it is not mistaken for ours; its mark is removed.
        """
        if not self.used:
            return [rendered]
        rendered = rendered.replace(SENTINEL[:1] + self.mark + SENTINEL[1:], SENTINEL)
        # `tojson` writes the mark as an escape, which stands for the same character.
        code = ord(self.mark)
        escaped = f"\\u{code:04x}" if code < 0x10000 else ""
        if escaped and escaped in rendered:
            rendered = rendered.replace(escaped, self.mark)
        return rendered.split(self.mark)

    def _checked(self, piece: str) -> str:
        """Put marks between all characters of a piece that the normaliser would make a control string."""
        if not self._control.needs_normalized_check or piece.isascii():
            return piece
        normalizer = self._tokenizer.backend.normalizer
        if normalizer is None or normalizer.normalize_str(piece) not in self._control:
            return piece
        self.used = True
        return self.mark.join(piece)


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
