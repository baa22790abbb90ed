"""Read the values inside tool calls: JSON with the raw text of each member, and Python-like literals.

Both readers take linear time, stop at a fixed nesting depth, and raise only `ValueError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from agentenv.core.arguments import decode_at

__all__ = [
    "MAX_DEPTH",
    "LiteralReader",
    "Member",
    "json_items",
    "json_members",
    "json_object",
    "json_value",
    "skip_space",
    "too_deep",
]

MAX_DEPTH = 100
"""Greatest nesting depth that is read; deeper values are malformed."""

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]', re.DOTALL)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a JSON object."""

    value: object
    raw: str
    """Text of the value, exactly as it was written."""
    usable: bool = True
    """False for valid JSON that cannot be passed to a tool."""
    inner: Mapping[str, Member] | None = None
    """Members of the value, if they were requested with `within`."""

    @property
    def values(self) -> Mapping[str, Any] | None:
        """The value if it is an object that can be passed to a tool, else None."""
        return cast("dict[str, Any]", self.value) if self.usable and isinstance(self.value, dict) else None


def too_deep(text: str) -> bool:
    """Return True if JSON text is nested deeper than `MAX_DEPTH`, over which templates and tools recurse."""
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return False
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
        if depth > MAX_DEPTH:
            return True
    return False


def skip_space(text: str, start: int) -> int:
    """Return the first position at or after `start` that is not JSON white space."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


def json_value(text: str, start: int = 0) -> tuple[object, int]:
    """Read one JSON value; return it and the position after it.

    Raises:
        ValueError: The text there is not valid JSON; the message says what is wrong and where.
    """
    try:
        return _DECODER.raw_decode(text, skip_space(text, start))
    except RecursionError:
        raise ValueError("nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - start}") from None


def json_object(text: str, start: int = 0) -> tuple[Member, int]:
    """Read one JSON object; return it with its text and the position after it.

    Raises:
        ValueError: The text there is not a valid JSON object; the message says what is wrong and where.
    """
    position = skip_space(text, start)
    if not text.startswith("{", position):
        raise ValueError("a JSON object was expected")
    return _member(text, position)


def json_members(text: str, start: int = 0, *, within: str = "") -> tuple[dict[str, Member], int]:
    """Read one JSON object; return its members with their raw text and the position after it.

    Each member is decoded only once, in place; the arguments of a call are such a member.

    Args:
        text: the text to read from.
        start: the position to begin at.
        within: key of a member whose own members are returned too, as `Member.inner`.

    Raises:
        ValueError: The text there is not a valid JSON object; the message says what is wrong and where.
    """
    start = skip_space(text, start)
    if not text.startswith("{", start):
        raise ValueError("a JSON object was expected")
    members: dict[str, Member] = {}
    try:
        position, more = _opened(text, start, "}")
        while more:
            key, position = _key(text, position)
            if key == within and text.startswith("{", position):
                inner, end = json_members(text, position)
                values = {name: member.value for name, member in inner.items()}
                members[key], position = Member(values, text[position:end], inner=inner), end
            else:
                members[key], position = _member(text, position)
            position, more = _next(text, position, "}")
    except (ValueError, RecursionError) as error:
        json_value(text, start)  # raises with the message of the decoder, which says what is wrong and where
        raise ValueError("nested too deep") from error
    return members, position


def json_items(text: str, start: int = 0, *, within: str = "") -> tuple[list[dict[str, Member]], int]:
    """Read a JSON array of objects, or one object; return their members and the position after.

    Raises:
        ValueError: The text there is neither an array of objects nor an object.
    """
    start = skip_space(text, start)
    if not text.startswith("[", start):
        members, end = json_members(text, start, within=within)
        return [members], end
    items: list[dict[str, Member]] = []
    try:
        position, more = _opened(text, start, "]")
        while more:
            members, position = json_members(text, position, within=within)
            items.append(members)
            position, more = _next(text, position, "]")
    except ValueError:
        json_value(text, start)  # raises if the whole is not JSON, which is the more useful message
        raise
    return items, position


def _opened(text: str, start: int, closes: str) -> tuple[int, bool]:
    """Step into an object or array; return the next position, and whether it has any members."""
    position = skip_space(text, start + 1)
    return (position + 1, False) if text.startswith(closes, position) else (position, True)


def _next(text: str, position: int, closes: str) -> tuple[int, bool]:
    """Step over the separator after a member; return the next position, and whether a member follows."""
    position = skip_space(text, position)
    if text.startswith(closes, position):
        return position + 1, False
    if not text.startswith(",", position):
        raise ValueError("a comma was expected")
    return skip_space(text, position + 1), True


def _key(text: str, position: int) -> tuple[str, int]:
    """Read a key and its colon; return the key and the position of its value."""
    if not text.startswith('"', position):
        raise ValueError("a key in double quotes was expected")
    key, position = json_value(text, position)
    position = skip_space(text, position)
    if not text.startswith(":", position):
        raise ValueError("a colon was expected")
    return cast("str", key), skip_space(text, position + 1)


def _member(text: str, position: int) -> tuple[Member, int]:
    try:
        value, end = decode_at(text, position)
    except (ValueError, RecursionError):
        # This is JSON that cannot be passed to a tool, such as a repeated key; the tool will say so.
        value, end = json_value(text, position)
        return Member(value, text[position:end], usable=False), end
    return Member(value, text[position:end]), end


_NUMBER = re.compile(r"-?\d{1,400}(?:\.\d{1,400})?(?:[eE][+-]?\d{1,4})?")
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_QUOTED = {quote: re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL) for quote in ("'", '"')}
_ESCAPE = re.compile(r"\\(U0[0-9a-fA-F]{7}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|\n|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}


class LiteralReader:
    """Reads Python-like literals (strings, numbers, constants, lists, objects) without evaluating them.

    Args:
        text: the text to read from.
        quote: a tag that may enclose strings in place of quotes, such as `<|"|>`; it knows no escapes.
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
        start = skip_space(self.text, start)
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
        if first == "{":
            return self.pairs("}", ":", start + 1, depth)
        return self._scalar(start)

    def pairs(self, closes: str, joins: str, start: int, depth: int = 0) -> tuple[dict[str, object], int]:
        """Read `key joins value` pairs up to the closing character; keys need no quotes.

        Raises:
            ValueError: The text there is not a sequence of such pairs.
        """
        pairs: dict[str, object] = {}
        position = skip_space(self.text, start)
        while not self.text.startswith(closes, position):
            key, position = self._key(position, depth)
            position = skip_space(self.text, position)
            if not self.text.startswith(joins, position):
                raise ValueError(f"{joins!r} was expected at character {position}")
            pairs[key], position = self.value(position + len(joins), depth + 1)
            position = self._next(position, closes)
        return pairs, position + len(closes)

    def name(self, start: int) -> tuple[str, int]:
        """Read a bare name.

        Raises:
            ValueError: There is no name at this position.
        """
        match = _NAME.match(self.text, skip_space(self.text, start))
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
        position = skip_space(self.text, position)
        while not self.text.startswith(closes, position):
            item, position = self.value(position, depth + 1)
            items.append(item)
            position = self._next(position, closes)
        return items, position + 1

    def _next(self, position: int, closes: str) -> int:
        """Step over a comma; stay where the closing character is."""
        position = skip_space(self.text, position)
        if self.text.startswith(",", position):
            return skip_space(self.text, position + 1)
        if not self.text.startswith(closes, position):
            raise ValueError(f"',' or {closes!r} was expected at character {position}")
        return position

    def _string(self, quote: str, start: int) -> tuple[str, int]:
        match = _QUOTED[quote].match(self.text, start)
        if match is None:
            raise ValueError("a string is not closed")
        return _ESCAPE.sub(_unescape, match.group(1)), match.end()

    def _scalar(self, start: int) -> tuple[object, int]:
        if number := _NUMBER.match(self.text, start):
            text = number.group()
            return (int(text) if text.lstrip("-").isdigit() else float(text)), number.end()
        word = _NAME.match(self.text, start)
        if word is None or word.group() not in _WORDS:
            raise ValueError(f"a value was expected at character {start}")
        return _WORDS[word.group()], word.end()


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1)
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, code if code in "\\'\"/" else "\\" + code)
