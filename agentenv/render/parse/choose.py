"""Recognise the tool-call grammar of a template from a call that the template rendered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from agentenv.core.messages import CallStatus, text_of
from agentenv.render.control import ControlSet
from agentenv.render.parse.grammar import Grammar, ToolIndex, TurnText
from agentenv.render.parse.library import GRAMMARS
from agentenv.render.parse.turn import TurnReader

__all__ = ["recognise"]

_EMPTY_TAGS = re.compile(r"<([^\s<>/]+)>\s*</\1>")
"""Matches the tags around calls that were read without them."""


def recognise(
    written: Sequence[str],
    call: tuple[str, Mapping[str, object]],
    tools: Sequence[Mapping[str, object]],
    control: ControlSet,
    twice: Sequence[str] = (),
) -> Grammar | None:
    """Return the first grammar that parses the rendered call correctly, or None.

    Args:
        written: the call as the template writes it, once for each likely end of the turn.
        call: name and arguments of the rendered call.
        tools: schemas of the tools, among them that of the call.
        control: the control strings of the vocabulary.
        twice: a turn with the same call two times; a grammar that parses both is preferred.
    """
    candidates: list[Grammar] = []
    bare: list[Grammar] = []
    for text in written:
        for grammar in chain(GRAMMARS.values(), _inferred(text, call)):
            if _reads(grammar, text, [call], tools, control):
                found = [_reads(grammar, both, [call, call], tools, control) for both in twice]
                if "all" in found:
                    return grammar
                (bare if any(found) else candidates).append(grammar)
    return next(iter((*bare, *candidates)), None)


def _inferred(text: str, call: tuple[str, Mapping[str, object]]) -> Iterator[Grammar]:
    from agentenv.render.parse.infer import inferred

    yield from inferred(text, *call)


def _reads(
    grammar: Grammar,
    text: str,
    expected: Sequence[tuple[str, Mapping[str, object]]],
    tools: Sequence[Mapping[str, object]],
    control: ControlSet,
) -> str:
    """Return "all" if the grammar reads the calls, "calls" if the tags around them are left, else ""."""
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
        return ""
    return "calls" if _EMPTY_TAGS.search(text_of(read.message)) else "all"


def _same(read: Mapping[str, object], rendered: Mapping[str, object]) -> bool:
    """Return True if the arguments agree as text, because some templates write every value as text."""
    return {key: str(value) for key, value in read.items()} == {
        key: str(value) for key, value in rendered.items()
    }
