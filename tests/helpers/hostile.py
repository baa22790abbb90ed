"""Values that break what prints, parses or compares them, for every field that others can set."""

from __future__ import annotations

import io
import re
from typing import Any

TEXTS = (
    "\ud800",
    "caf\udce9",
    "\x1b]0;mine\x07\x1b[2J",
    "\x9b31m",
    "a\rb\nc\u202ed",
    "nan",
    "1e999",
    "9" * 5_000,
    "[" * 20_000,
    "..",
    "",
    "{x!r:>99999999}",
    "%s%n",
    "x" * 300,
)
"""Texts for places on the command line and in files; none of them is right anywhere."""
DEEP = "[" * 100_000 + "]" * 100_000
NUMBERS = ("NaN", "Infinity", "-1e999", "1" + "0" * 5_000, "-1", "true")
ACTING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")


def json_values() -> list[str]:
    """JSON texts of every kind that a field may be set to, valid for Python's reader at least."""
    import json

    return [*map(json.dumps, TEXTS), *NUMBERS, DEEP, "null", "[]", "{}", '{"a": [null]}']


class Terminal(io.TextIOWrapper):
    """A terminal's end of a strict UTF-8 stream, which keeps what arrives."""

    def __init__(self, *, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, errors="strict", newline="", write_through=True)

    @property
    def shown(self) -> str:
        """Everything that was written."""
        inner: Any = self.buffer
        return inner.getvalue().decode(self.encoding)
