r"""Text of others on its way to a terminal, a log line or a title: what would act there is shown instead.

A model, a server, a tool or a file may put into its words what a terminal obeys (escapes that move the
cursor, rename the window or fill the clipboard), what reorders a line, or half a character, which no encoding
has. All of them are written out as in Python's source, such as `\x1b`; other text is not changed. `one_line`
is the `repr` of results, which fits a terminal.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import logging

__all__ = ["MAX_CHARS", "VisibleStream", "innermost", "logger", "one_line", "show_only", "visible"]

_ACTING = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)


def visible(text: str) -> str:
    """Return a text in which control characters, changes of direction and half characters are written out."""
    return _ACTING.sub(_written_out, text)


def _written_out(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def innermost(stream: TextIO) -> TextIO:
    """Return the stream itself, under every stream that was put before it."""
    while (under := getattr(stream, "rich_proxied_file", None)) is not None:
        stream = under
    return stream


class VisibleStream:
    """A stream that shows what would act on a terminal, and that no character makes fail.

    Args:
        stream: where the text is written.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.rich_proxied_file = innermost(stream)
        """Where rich writes the escapes that it makes itself; what it is given has to be `visible`."""

    def write(self, text: str) -> int:
        """Write a text; return its length."""
        stream = self._stream
        # A progress bar begins with the one control character that does no harm at the start of a line.
        start = "\r" if text.startswith("\r") else ""
        shown = start + visible(text[len(start) :])
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each text."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _show(record: logging.LogRecord) -> bool:
    """Write out what a record would do to a terminal, also in its traceback; keep others as they are."""
    text = record.getMessage()
    if (shown := visible(text)) != text:
        record.msg, record.args = shown, ()
    if record.exc_info and not record.exc_text:
        lines = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        if (shown := visible(lines)) != lines:
            record.exc_text = shown
    return True


def logger(name: str) -> logging.Logger:
    """Return a module's logger, whose records are `visible` whatever a program does with them."""
    import logging  # here, because the command line shows its help without it, in two thirds of the time

    own = logging.getLogger(name)
    own.addFilter(_show)
    return own


def show_only() -> tuple[TextIO, TextIO]:
    """Make this process's output and errors `VisibleStream`s; return what they were."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (VisibleStream(stream) for stream in before)  # type: ignore[assignment]
    return before


MAX_CHARS = 120


def one_line(value: object, *parts: object) -> str:
    """Return a `repr` of at most `MAX_CHARS` characters: the class and what tells its objects apart.

    Args:
        value: the object.
        parts: what to say of it; None and empty texts are left out.
    """
    told = ", ".join(" ".join(visible(str(part)).split()) for part in parts if part not in (None, ""))
    name = type(value).__name__
    room = MAX_CHARS - len(name) - 2
    return f"{name}({told if len(told) <= room else told[: room - 3] + '...'})"
