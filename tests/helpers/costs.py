"""Count what work is made of, where a clock would also measure whatever else the machine does."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from re import _compiler, _constants, _parser
from types import FrameType
from typing import Any, TypeVar

import pytest

import agentenv
from agentenv.render import renderer
from agentenv.render.parse.grammar import TurnText

T = TypeVar("T")
LIBRARY = f"{Path(agentenv.__file__).parent}/"


@dataclass
class Costs:
    """What some code did."""

    lines: int = 0
    """Lines of the library that were run."""
    characters: int = 0
    """Characters that patterns read, and that texts were searched for and copied."""


@contextmanager
def lines_counted() -> Iterator[Costs]:
    """Count the lines of the library that this thread runs."""
    costs = Costs()

    def count(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        costs.lines += event in {"line", "call"}
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield costs
    finally:
        sys.settrace(before)


class CountedText(str):
    """A text that counts its characters as they are searched and copied."""

    costs: Costs

    def of(self, part: str) -> CountedText:
        """Return a part that counts too."""
        self.costs.characters += len(part)
        text = CountedText(part)
        text.costs = self.costs
        return text

    def find(self, tag: str, start: int = 0, end: int | None = None) -> int:
        found = super().find(tag, start, end)
        self.costs.characters += (found if found >= 0 else len(self) if end is None else end) - start
        return found

    def __getitem__(self, place: Any) -> CountedText:
        return self.of(super().__getitem__(place))

    def strip(self, letters: str | None = None) -> CountedText:
        return self.of(super().strip(letters))

    def lstrip(self, letters: str | None = None) -> CountedText:
        return self.of(super().lstrip(letters))

    def rstrip(self, letters: str | None = None) -> CountedText:
        return self.of(super().rstrip(letters))


class CountedPattern:
    """A pattern that counts the characters it looks at, also where it finds nothing."""

    def __init__(self, pattern: re.Pattern[str], costs: Costs) -> None:
        self._pattern, self._costs = pattern, costs
        tree = _parser.parse(pattern.pattern, pattern.flags)
        kind, branches = tree[0] if len(tree) == 1 else (None, None)
        ways = branches[1] if kind is _constants.BRANCH else [tree]
        self._begun = [_compiler.compile(_begun(way), pattern.flags) for way in ways]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pattern, name)

    def match(self, text: str, at: int = 0, end: int = sys.maxsize) -> re.Match[str] | None:
        return self._counted(self._pattern.match(text, at, end), text, at, end)

    def fullmatch(self, text: str, at: int = 0, end: int = sys.maxsize) -> re.Match[str] | None:
        return self._counted(self._pattern.fullmatch(text, at, end), text, at, end)

    def search(self, text: str, at: int = 0, end: int = sys.maxsize) -> re.Match[str] | None:
        match = self._pattern.search(text, at, end)
        for start in range(at, match.start() if match else min(len(text), end)):
            self._counted(None, text, start, end)
        return self._counted(match, text, at, end)

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        at = 0
        while (match := self.search(text, at)) is not None:
            yield match
            at = match.end() + (match.start() == match.end())

    def sub(self, by: Any, text: str) -> str:
        list(self.finditer(text))
        return self._pattern.sub(by, text)

    def _counted(self, match: T, text: str, at: int, end: int) -> T:
        begun = [one.match(text, at, end) for one in self._begun] if match is None else [match]
        self._costs.characters += 1 + max(one.end() - one.start() for one in begun)
        return match


def _begun(tree: Any) -> Any:
    """Return what matches as much of a text as the first items of a pattern do."""
    rest = _parser.SubPattern(tree.state, [])
    for item in reversed(list(tree)):
        rest = _parser.SubPattern(
            tree.state, [(_constants.MAX_REPEAT, (0, 1, _parser.SubPattern(tree.state, [item, *rest])))]
        )
    return rest


class CountedRe:
    """The module `re` with patterns that count."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    def compile(self, pattern: str, flags: int = 0) -> CountedPattern:
        return CountedPattern(re.compile(pattern, flags), self._costs)

    def search(self, pattern: str, text: str, flags: int = 0) -> re.Match[str] | None:
        return self.compile(pattern, flags).search(text)

    def fullmatch(self, pattern: str, text: str, flags: int = 0) -> re.Match[str] | None:
        return self.compile(pattern, flags).fullmatch(text)

    def finditer(self, pattern: str, text: str, flags: int = 0) -> Iterator[re.Match[str]]:
        return self.compile(pattern, flags).finditer(text)


@contextmanager
def parsing_counted() -> Iterator[Costs]:
    """Count the lines that parsers run and the characters that they read."""

    def counted(value: Any) -> Any:
        if isinstance(value, re.Pattern):
            return CountedPattern(value, costs)
        if isinstance(value, dict) and any(isinstance(one, re.Pattern) for one in value.values()):
            return {key: counted(one) for key, one in value.items()}
        return CountedRe(costs) if value is re else value

    class CountedTurn(TurnText):
        __slots__ = ()

        def __init__(self, text: str, *arguments: Any) -> None:
            whole = CountedText(text)
            whole.costs = costs
            super().__init__(whole, *arguments)

    with lines_counted() as costs, pytest.MonkeyPatch.context() as patched:
        for module in [one for name, one in sys.modules.items() if name.startswith("agentenv.render.parse.")]:
            for name, value in vars(module).items():
                if (other := counted(value)) is not value:
                    patched.setattr(module, name, other)
        patched.setattr(renderer, "TurnText", CountedTurn)
        yield costs
