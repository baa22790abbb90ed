"""The mistakes of the tasks: common errors, made in one line of a correct module.

Each pattern is tried at every position of every line. A mistake is used if the module still compiles and, on
the hidden inputs, returns another value, raises an error, or does not end. So each task has something to
repair.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from agentenv_envs.file_edit.exercises import function_of, source_of
from agentenv_envs.file_edit.inputs import INPUTS

__all__ = ["expected", "mistakes_in"]

PATTERNS = [
    # a comparison that is off by one, or the wrong way round
    (r" < ", " <= "),
    (r" <= ", " < "),
    (r" > ", " >= "),
    (r" >= ", " > "),
    (r" == ", " != "),
    (r" != ", " == "),
    # a condition
    (r" and ", " or "),
    (r" or ", " and "),
    (r"\bnot ", ""),
    (r"\belif ", "if "),
    (r"\bwhile ", "if "),
    (r"\bcontinue$", "break"),
    # a number that is off by one
    (r" [+-] 1\b", ""),
    (r"\b0\b", "1"),
    (r"\b1\b", "0"),
    (r"\b1\b", "2"),
    (r"\b2\b", "1"),
    # an operator
    (r" \+ (?=[a-z])", " - "),
    (r" - (?=[a-z])", " + "),
    (r" \* ", " + "),
    (r" // ", " % "),
    (r" % ", " // "),
    (r" [+-/]+= ", " = "),
    # the other end, the other order, the other name
    (r"\[0\]", "[-1]"),
    (r"\[-1\]", "[0]"),
    (r"\[::-1\]", ""),
    (r"\bmax\(", "min("),
    (r"\bmin\(", "max("),
    (r"\bsorted\(", "list("),
    (r"\.append\(", ".insert(0, "),
    (r"\.pop\(\)", ".pop(0)"),
    (r"\bleft\b", "right"),
    (r"\bright\b", "left"),
    # a result, or a line that was forgotten, or stands too deep
    (r"\breturn True$", "return False"),
    (r"\breturn False$", "return True"),
    (r"\.lower\(\)", ""),
    (r"^    return (?=\w+$)", "        return "),
    (r"^(        +)[a-z_.]+(\[.+\])? [+-/]*= .+$", r"\1pass"),
    (r"^(        +)[a-z_.]+\(.+\)$", r"\1pass"),
]
_MAX_LINES_RUN = 20_000
_PER_FUNCTION = 24


class _Endless(Exception):
    """The function ran longer than any correct function does."""


def mistakes_in(name: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the broken line of each mistake, in the order of the module."""
    lines = source_of(name).splitlines()
    first = next(number for number, line in enumerate(lines) if line.strip().endswith('"""')) + 1
    mistakes: dict[tuple[int, str], None] = {}
    for number in range(first, len(lines)):
        for pattern, instead in PATTERNS:
            for match in re.finditer(pattern, lines[number]):
                broken = lines[number][: match.start()] + match.expand(instead) + lines[number][match.end() :]
                if _is_wrong(name, [*lines[:number], broken, *lines[number + 1 :]]):
                    mistakes[number, broken] = None
    # If there are too many mistakes, take some that are spread over the whole module.
    every = max(1, -(-len(mistakes) // _PER_FUNCTION))
    yield from list(mistakes)[::every]


@lru_cache(maxsize=len(INPUTS))
def expected(name: str) -> str:
    """Return what the correct function returns for the hidden inputs, as JSON."""
    function = function_of(name)
    return json.dumps([function(*json.loads(json.dumps(given))) for given in INPUTS[name]])


def _is_wrong(name: str, lines: list[str]) -> bool:
    try:
        code = compile("\n".join(lines), "<module>", "exec")
    except SyntaxError:
        return False
    try:
        return _results(code, name) != expected(name)
    except Exception:  # noqa: BLE001 - a mistake may raise anything
        return True


def _results(code: CodeType, name: str) -> str:
    """Run a module on the hidden inputs, for a limited number of lines, and return the results as JSON."""
    left = _MAX_LINES_RUN

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Endless
        return count if frame.f_code.co_filename == "<module>" else None

    space: dict[str, Any] = {}
    exec(code, space)  # noqa: S102 - our own text with one of our own mistakes
    before = sys.gettrace()
    sys.settrace(count)
    try:
        return json.dumps([space[name](*json.loads(json.dumps(given))) for given in INPUTS[name]])
    finally:
        sys.settrace(before)
