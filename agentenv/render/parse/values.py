"""Values inside tool calls: JSON with the raw text of each member, and Python-like literals.

Both readers are linear, stop at a fixed nesting depth, and raise only `ValueError`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import cast

__all__ = ["MAX_DEPTH", "Literals", "Member", "json_members", "json_value", "skip_space"]

MAX_DEPTH = 100
"""Nesting that is still read; deeper values are malformed."""

_SPACE = re.compile(r"[ \t\n\r]*")


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a JSON object."""

    value: object
    raw: str
    """Its text, exactly as it stands."""


def skip_space(text: str, start: int) -> int:
    """Return the first position at or after `start` that is not JSON white space."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


def json_value(text: str, start: int = 0) -> tuple[object, int]:
    """Read one JSON value; return it and the position after it.

    Raises:
        ValueError: No valid JSON stands there; the message says what and where.
    """
    try:
        return _DECODER.raw_decode(text, skip_space(text, start))
    except RecursionError:
        raise ValueError("nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - start}") from None


def json_members(text: str, start: int = 0) -> tuple[dict[str, Member], int]:
    """Read one JSON object; return its members with their raw text and the position after it.

    Raises:
        ValueError: No valid JSON object stands there.
    """
    position = skip_space(text, start)
    if not text.startswith("{", position):
        raise ValueError("a JSON object was expected")
    _, end = json_value(text, position)  # valid as a whole: what follows cannot fail
    members: dict[str, Member] = {}
    position = skip_space(text, position + 1)
    while text[position] != "}":
        key, position = json_value(text, position)
        position = skip_space(text, skip_space(text, position) + 1)  # over the colon
        value, after = json_value(text, position)
        members[cast("str", key)] = Member(value, text[position:after])
        position = skip_space(text, after)
        if text[position] == ",":
            position = skip_space(text, position + 1)
    return members, end
