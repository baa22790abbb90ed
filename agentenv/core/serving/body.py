"""Read JSON that a stranger sent.

Python's parser accepts more than JSON allows (`NaN`), and some of what JSON allows breaks later code: objects
that are nested deeper than Python's stack, and half of a surrogate pair, which no encoding can write. And its
parser holds everybody up until it is done, so the values are counted before they are made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn

from agentenv.core.errors import UsageError

__all__ = ["parse_json", "parse_json_beginning"]

MAX_DEPTH = 100
"""Most levels of nested lists and objects."""
MAX_VALUES = 500_000
"""Most values of one text; a list of that many takes a tenth of a second and up to 120 MB."""
_PARTS = r'"(?:[^"\\]++|\\.)*+"?|[\[{,]'
# A quotation mark that nothing closes still ends the match, so no byte is looked at twice.
_PARTS_OF_TEXT = re.compile(_PARTS, re.DOTALL)
_PARTS_OF_BYTES = re.compile(_PARTS.encode(), re.DOTALL)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        UsageError: The text is not JSON, has too many values, is nested too deeply, or has text that is not
            Unicode.
    """
    _check_size(text)
    with _told():
        value = json.loads(text, parse_constant=_no_constant)
    has_escapes = (b"\\u" if isinstance(text, bytes) else "\\u") in text  # pyright: ignore[reportOperatorIssue]
    _check(value, has_escapes=has_escapes)
    return value


def parse_json_beginning(text: str) -> tuple[Any, int]:
    """Return the value with which a text begins, and where it ends.

    Raises:
        UsageError: As for `parse_json`.
    """
    _check_size(text)
    with _told():
        value, end = _DECODER.raw_decode(text)
    _check(value, has_escapes=text.find("\\u", 0, end) >= 0)
    return value, end


@contextmanager
def _told() -> Generator[None]:
    """Turn the errors of the parser into errors of the client."""
    try:
        yield
    except RecursionError:
        raise UsageError(f"the JSON is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise UsageError(f"this is not JSON: {error}") from None


def _check_size(text: str | bytes) -> None:
    """Refuse a text with more values than `MAX_VALUES`, before any of them is made."""
    if isinstance(text, bytes):
        most, parts = sum(map(text.count, (b"[", b"{", b","))), _PARTS_OF_BYTES.finditer(text)
    else:
        most, parts = sum(map(text.count, ("[", "{", ","))), _PARTS_OF_TEXT.finditer(text)
    if most <= MAX_VALUES:  # most texts; those in others are full of commas that are in strings
        return
    count = 0
    for part in parts:
        count += part.end() - part.start() == 1
        if count > MAX_VALUES:
            raise UsageError(f"the JSON has more than {MAX_VALUES:,} values")


def _check(value: Any, *, has_escapes: bool) -> None:
    if _is_too_deep(value):
        raise UsageError(f"the JSON is nested deeper than {MAX_DEPTH} levels")
    if has_escapes:
        _check_unicode(value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for part in level
            if isinstance(part, dict | list)
            for item in (part.values() if isinstance(part, dict) else part)
        ]
        if not level:
            return False
    return True


def _check_unicode(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError("the JSON has half of a surrogate pair, which is not Unicode text") from None
