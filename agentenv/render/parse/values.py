"""Read Python-like literals inside tool calls.

The reader takes linear time, stops at a fixed nesting depth, and raises only `ValueError`.
"""

from __future__ import annotations

import re

__all__ = ["MAX_DEPTH", "LiteralReader", "Unquoted", "unescaped"]

MAX_DEPTH = 128
"""Greatest nesting depth that is read; deeper values are malformed."""

_NUMBER = re.compile(r"-?\d{1,400}(?:\.\d{1,400})?(?:[eE][+-]?\d{1,4})?")
_UNQUOTED = re.compile(r"[^,{}\[\]\n]+")
_SET = re.compile(r"""\{\s*(?:'[^']*'|"[^"]*"|-?[\d.]+)\s*[,}]""")
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_QUOTED = {quote: re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL) for quote in ("'", '"')}
_ESCAPE = re.compile(r"\\(U0[0-9a-fA-F]{7}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|\n|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_SPACE = re.compile(r"[ \t\n\r]*")


class Unquoted(str):
    """A scalar without quotes, for which the schema of its tool decides what it is."""

    __slots__ = ()


class LiteralReader:
    """Reads Python-like literals (strings, numbers, constants, lists, objects) without evaluating them.

    Args:
        text: the text to read from.
        quote: a tag that encloses strings, such as `<|"|>`; it knows no escapes. With it other scalars are
            `Unquoted`.
    """

    __slots__ = ("_quote", "text")

    def __init__(self, text: str, quote: str = "") -> None:
        self.text = text
        self._quote = quote

    def value(self, start: int, depth: int = 0) -> tuple[object, int]:
        """Read one value; return it and the position after it.

        Raises:
            ValueError: There is no value at this position.
        """
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        start = _after_space(self.text, start)
        if self._quote and self.text.startswith(self._quote, start):
            inside = start + len(self._quote)
            end = self.text.find(self._quote, inside)
            if end < 0:
                raise ValueError("a string is not closed")
            return self.text[inside:end], end + len(self._quote)
        first = self.text[start : start + 1]
        if first in _QUOTED:
            return self._string(first, start)
        if first in {"[", "("}:
            return self._list("]" if first == "[" else ")", start + 1, depth)
        if first == "{" and _SET.match(self.text, start):
            return self._list("}", start + 1, depth)
        if first == "{":
            return self.pairs("}", ":", start + 1, depth)
        return self._unquoted(start) if self._quote else self._scalar(start)

    def pairs(self, closes: str, joins: str, start: int, depth: int = 0) -> tuple[dict[str, object], int]:
        """Read `key joins value` pairs up to the closing character; keys need no quotes.

        Raises:
            ValueError: The text there is not a sequence of such pairs.
        """
        pairs: dict[str, object] = {}
        position = _after_space(self.text, start)
        while not self.text.startswith(closes, position):
            key, position = self._key(position, depth)
            position = _after_space(self.text, position)
            if not self.text.startswith(joins, position):
                raise ValueError(f"{joins!r} was expected at character {position}")
            if key in pairs:
                raise ValueError(f"the key {key!r:.80} appears twice; write it once")
            pairs[key], position = self.value(position + len(joins), depth + 1)
            position = self._next(position, closes)
        return pairs, position + len(closes)

    def name(self, start: int) -> tuple[str, int]:
        """Read a bare name.

        Raises:
            ValueError: There is no name at this position.
        """
        match = _NAME.match(self.text, _after_space(self.text, start))
        if match is None:
            raise ValueError(f"a name was expected at character {start}")
        return match.group(), match.end()

    def _key(self, position: int, depth: int) -> tuple[str, int]:
        if self.text[position : position + 1] in _QUOTED or (
            self._quote and self.text.startswith(self._quote, position)
        ):
            key, position = self.value(position, depth + 1)
            return str(key), position
        return self.name(position)

    def _list(self, closes: str, position: int, depth: int) -> tuple[list[object], int]:
        items: list[object] = []
        position = _after_space(self.text, position)
        while not self.text.startswith(closes, position):
            item, position = self.value(position, depth + 1)
            items.append(item)
            position = self._next(position, closes)
        return items, position + 1

    def _next(self, position: int, closes: str) -> int:
        """Step over a comma; stay where the closing character is."""
        position = _after_space(self.text, position)
        if self.text.startswith(",", position):
            return _after_space(self.text, position + 1)
        if not self.text.startswith(closes, position):
            raise ValueError(f"',' or {closes!r} was expected at character {position}")
        return position

    def _string(self, quote: str, start: int) -> tuple[str, int]:
        match = _QUOTED[quote].match(self.text, start)
        if match is None:
            raise ValueError("a string is not closed")
        return unescaped(match.group(1)), match.end()

    def _unquoted(self, start: int) -> tuple[str, int]:
        word = _UNQUOTED.match(self.text, start)
        if word is None or self._quote in word.group():
            raise ValueError(f"a value was expected at character {start}")
        return Unquoted(word.group().rstrip()), word.end()

    def _scalar(self, start: int) -> tuple[object, int]:
        if number := _NUMBER.match(self.text, start):
            text = number.group()
            return (int(text) if text.lstrip("-").isdigit() else float(text)), number.end()
        word = _NAME.match(self.text, start)
        if word is None or word.group() not in _WORDS:
            raise ValueError(f"a value was expected at character {start}")
        return _WORDS[word.group()], word.end()


def unescaped(text: str) -> str:
    """Return what stands between two quotes, with its escapes replaced."""
    return _ESCAPE.sub(_unescape, text)


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1)
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, code if code in "\\'\"/" else "\\" + code)


def _after_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return start if match is None else match.end()
