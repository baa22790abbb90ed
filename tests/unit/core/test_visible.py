"""Texts of others on their way to a terminal, a log line or a title."""

from __future__ import annotations

import io
import logging

import pytest

from agentenv.core.visible import VisibleStream, innermost, logger, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;mine\x07", r"\x1b]0;mine\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("a\rb", r"a\x0db"),
        ("\ud800", r"\ud800"),
        ("invoice\u202etxt.exe", r"invoice\u202etxt.exe"),
        ("two\r\nlines\tand 中文 🙂", "two\r\nlines\tand 中文 🙂"),
    ],
)
def test_what_acts_on_a_terminal_is_written_out_and_the_rest_stays(text, shown):
    assert visible(text) == shown


def test_a_stream_shows_what_its_encoding_lacks_and_lets_rich_and_bars_through():
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="")
    stream = VisibleStream(VisibleStream(plain))

    stream.writelines(["\r50 %", "\x1b[2J", "é\ud800\n"])
    stream.flush()

    assert plain.buffer.getvalue() == b"\r50 %\\x1b[2J\\xe9\\ud800\n"
    assert stream.rich_proxied_file is plain
    assert innermost(stream) is plain


def test_a_log_line_and_its_traceback_are_visible_to_every_handler():
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    own = logger("agentenv.core.test_visible")
    own.addHandler(handler)
    try:
        own.warning("%s failed", "\x1b[2Jtool")
        try:
            raise ValueError("\x1b]0;title\x07")
        except ValueError:
            own.exception("again")
    finally:
        own.removeHandler(handler)

    assert "\x1b" not in written.getvalue()
    assert r"\x1b[2Jtool failed" in written.getvalue()
    assert r"ValueError: \x1b]0;title" in written.getvalue()
