"""Recognise the tool-call grammar of a template from a call that the template rendered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

from agentenv.core.messages import CallStatus, text_of
from agentenv.render.control import ControlSet
from agentenv.render.parse.grammar import Grammar, ToolIndex, TurnText
from agentenv.render.parse.library import GRAMMARS
from agentenv.render.parse.turn import TurnReader

__all__ = ["recognise"]

Call: TypeAlias = tuple[str, Mapping[str, object]]
"""Name and arguments of a rendered call."""
_EMPTY_TAGS = re.compile(r"<([^\s<>/]+)>\s*</\1>")
"""Matches the tags around calls that were read without them."""


def recognise(
    turns: Sequence[tuple[Sequence[str], Sequence[Call]]],
    tools: Sequence[Mapping[str, object]],
    control: ControlSet,
) -> Grammar | None:
    """Return the grammar that reads the first turn and most of the others; None if none reads the first.

    Args:
        turns: turns as the template writes them, once for each likely end, with the calls that they hold. The
            first has one harmless call, of which grammars are inferred too.
        tools: schemas of the tools.
        control: the control strings of the vocabulary.
    """
    (written, calls), *others = turns
    others = [turn for turn in others if turn[0]]
    best: Grammar | None = None
    most = -1
    for text in written:
        for grammar in chain(GRAMMARS.values(), _inferred(text, calls[0])):
            if not _reads(grammar, text, calls, tools, control):
                continue
            read = sum(
                max(_reads(grammar, each, expected, tools, control) for each in texts)
                for texts, expected in others
            )
            if read == 2 * len(others):
                return grammar
            if read > most:
                best, most = grammar, read
    return best


def _inferred(text: str, call: Call) -> Iterator[Grammar]:
    from agentenv.render.parse.infer import inferred

    yield from inferred(text, *call)


def _reads(
    grammar: Grammar,
    text: str,
    expected: Sequence[Call],
    tools: Sequence[Mapping[str, object]],
    control: ControlSet,
) -> int:
    """Return 2 if the grammar reads the calls, 1 if the tags around them are left, else 0."""
    places: dict[str, list[int]] = {}
    for position, string in control.positions(text):
        places.setdefault(string, []).append(position)
    turn = TurnText(text, places, control)
    read = TurnReader(grammar, control.strings, frozenset()).read(turn, ToolIndex.of(tools))
    calls = read.tool_calls
    right = len(calls) == len(expected) and all(
        call.status is CallStatus.OK and call.name == name and _same(json.loads(call.arguments), arguments)
        for call, (name, arguments) in zip(calls, expected, strict=True)
    )
    if not right:
        return 0
    return 1 if _EMPTY_TAGS.search(text_of(read.message)) else 2


def _same(read: Mapping[str, object], rendered: Mapping[str, object]) -> bool:
    """Return True if the arguments agree as text, because some templates write every value as text."""
    return {key: str(value) for key, value in read.items()} == {
        key: str(value) for key, value in rendered.items()
    }
