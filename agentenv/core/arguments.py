"""Read the JSON of a tool call's arguments, once: text to Python values, or one line for the model.

Nothing is guessed silently: a key given twice, a number that JSON has not, text that is not Unicode
and oversized arguments are refused with the reason. The parser of completions, the conversations with
chat APIs and the tools all read arguments here; whoever reads them first keeps the values in
`ToolCall.values`, and nobody reads them again.
"""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any

from agentenv.core.messages import ToolErrorKind

__all__ = ["MAX_ARGUMENT_CHARS", "ArgumentError", "check_text", "decode", "decode_at"]

MAX_ARGUMENT_CHARS = 1_000_000
"""Longer arguments are refused unread: no model samples them, and reading them stalls the rest."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89abcdefABCDEF]")
_SHOWN_CHARS = 40


class ArgumentError(ValueError):
    """The arguments cannot be used; the text is one line for the model."""

    def __init__(self, kind: ToolErrorKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


def decode(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        ArgumentError: The text is no JSON, or holds what a tool cannot be given.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 10, 0) : error.pos + 10]
        raise ArgumentError(
            ToolErrorKind.INVALID_JSON,
            f"the arguments are not valid JSON: {error.msg} at character {error.pos}, near {near!r}",
        ) from None
    except RecursionError:
        raise ArgumentError(ToolErrorKind.BAD_ARGUMENTS, "the arguments are nested too deeply") from None
    except ArgumentError:
        raise
    except ValueError:  # an integer with more digits than Python reads
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS, "the arguments hold a number with too many digits"
        ) from None
    check_text(text, value)
    return value


def decode_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that stands at a position of a longer text, and the position after it.

    Raises:
        ValueError: No JSON value stands there, or one that a tool cannot be given.
        RecursionError: It is nested too deeply.
    """
    value, end = _DECODER.raw_decode(text, start)
    check_text(text[start:end], value)
    return value, end


def check_text(text: str, value: object) -> None:
    """Check that JSON text and the value read from it hold whole characters only.

    Raises:
        ArgumentError: Half of a surrogate pair stands in them.
    """
    try:
        text.encode()
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(error.object[error.start]):04X}"
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS,
            f"the arguments hold half a character (lone surrogate {code}); write the whole character",
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS, f"the key {_short(twice)} is given twice; give it once"
        )
    return values


def _finite(digits: str) -> float:
    value = float(digits)
    return value if isfinite(value) else _not_json(digits)


def _not_json(constant: str) -> float:
    raise ArgumentError(
        ToolErrorKind.BAD_ARGUMENTS, f"the arguments hold {_short(constant)}, which is not a JSON number"
    )


def _short(text: str) -> str:
    shown = json.dumps(text, ensure_ascii=True)
    return shown if len(shown) <= _SHOWN_CHARS else shown[: _SHOWN_CHARS - 3] + "..."


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_not_json)
