"""What is told of exceptions that code from outside raises."""

from __future__ import annotations

import pytest

from agentenv.core.faults import first_line_of


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("nothing to say")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  \nthree"), "three"),
        (ValueError(""), "ValueError"),
        (AssertionError(), "AssertionError"),
        (KeyError("\n"), "'\\n'"),
        (Unspeakable(), "<str() of this Unspeakable failed>"),
    ],
)
def test_the_first_line_of_any_exception_can_be_told(error, line):
    assert first_line_of(error) == line
