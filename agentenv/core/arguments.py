"""Parse the JSON arguments of a tool call into Python values, or raise an error with one line for the model.

Nothing is guessed silently. A repeated key, a number that JSON does not have (such as NaN), text that is
not valid Unicode and oversized arguments are refused with the reason. The parser of completions, the
conversations with chat APIs and the tools all use this module. The first of them to parse a call stores
the values in `ToolCall.values`, so that the arguments are parsed only once.
"""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any

from agentenv.core.messages import ToolErrorKind

__all__ = ["MAX_ARGUMENT_CHARS", "ArgumentError", "check_text", "decode", "decode_at"]

MAX_ARGUMENT_CHARS = 1_000_000
"""Longer arguments are refused without parsing: no model samples them, and parsing them would block the
event loop."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89abcdefABCDEF]")
_SHOWN_CHARS = 40


class ArgumentError(ValueError):
    """The arguments cannot be used; `text` is one line for the model."""

    def __init__(self, kind: ToolErrorKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


def decode(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        ArgumentError: The text is not JSON, or contains a value that tools do not accept.
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
            ToolErrorKind.BAD_ARGUMENTS, "the arguments contain a number with too many digits"
        ) from None
    check_text(text, value)
    return value


def decode_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a position of a longer text, and the position after it.

    Raises:
        ValueError: No JSON value begins there, or tools do not accept it.
        RecursionError: The value is nested too deeply.
    """
    value, end = _DECODER.raw_decode(text, start)
    check_text(text[start:end], value)
    return value, end


def check_text(text: str, value: object) -> None:
    """Check that JSON text and the value parsed from it are valid Unicode.

    Raises:
        ArgumentError: They contain a lone surrogate, which is one half of a surrogate pair.
    """
    try:
        text.encode()
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(error.object[error.start]):04X}"
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS,
            f"the arguments contain an invalid Unicode surrogate ({code}); remove it",
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS, f"the key {_short(twice)} appears twice; write it once"
        )
    return values


def _finite(digits: str) -> float:
    value = float(digits)
    return value if isfinite(value) else _not_json(digits)


def _not_json(constant: str) -> float:
    raise ArgumentError(
        ToolErrorKind.BAD_ARGUMENTS, f"the arguments contain {_short(constant)}, which is not a JSON number"
    )


def _short(text: str) -> str:
    shown = json.dumps(text, ensure_ascii=True)
    return shown if len(shown) <= _SHOWN_CHARS else shown[: _SHOWN_CHARS - 3] + "..."


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_not_json)
