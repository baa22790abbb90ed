"""Recognise tool-call grammars: a template's from turns that it rendered, and that of a call in a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from agentenv.core.messages import CallStatus, ToolCall, text_of
from agentenv.render.control import ControlSet
from agentenv.render.parse.grammar import Grammar, ToolIndex, TurnText
from agentenv.render.parse.library import GRAMMARS
from agentenv.render.parse.turn import Forms, TurnReader
from agentenv.render.tail import PROBE_TOOL

__all__ = ["by_tags", "recognise", "written_calls"]

Call: TypeAlias = tuple[str, Mapping[str, object]]
"""Name and arguments of a rendered call."""
_EMPTY_TAGS = re.compile(r"<([^\s<>/]+)>\s*</\1>")
"""Matches the tags around calls that were read without them."""


def recognise(
    turns: Sequence[tuple[str, Sequence[Call]]], control: ControlSet, forms: Forms
) -> Grammar | None:
    """Return the grammar that reads the first turn and most of the others; None if none reads the first.

    Args:
        turns: turns with calls of `PROBE_TOOL` as the template writes them, or empty. The first has one
            harmless call, of which grammars are inferred too.
        control: the control strings of the vocabulary.
        forms: what is known of the turns of the template.
    """
    (once, calls), *others = [turn for turn in turns if turn[0]]
    best, most = None, 0
    tagged = [grammar for grammar in GRAMMARS.values() if grammar.bare is None]
    bare = [grammar for grammar in GRAMMARS.values() if grammar.bare is not None]
    for grammar in chain(tagged, _inferred(once, calls[0]), bare):
        reader = TurnReader(grammar, control.strings, frozenset(), forms)
        read, untyped = _reads(reader, once, calls, control)
        score = read and read + sum(_reads(reader, text, expected, control)[0] for text, expected in others)
        if score > most:
            best, most = replace(grammar, untyped=True) if untyped else grammar, score
        if score == 2 + 2 * len(others):
            break
    return best


def written_calls(text: str, tools: ToolIndex, token_ids: Sequence[int] = ()) -> tuple[ToolCall, ...]:
    """Return the calls of tools that a text holds in the words of any grammar.

    Args:
        text: a turn that was read as text.
        tools: the tools. Only well-formed calls of them that have arguments count.
        token_ids: the ids of the turn, which decide the ids of its calls.
    """
    if not any(name in text for name in tools.schemas):
        return ()
    control = ControlSet({})
    readings = [(grammar, text) for grammar in GRAMMARS.values()]
    # Python's calls are read in a list, and objects without the word "name" behind a tag.
    readings += [(GRAMMARS["pythonic"], f"[{text.strip()}]"), (GRAMMARS["granite"], f"<|tool_call|>{text}")]
    for grammar, written in readings:
        turn = TurnText(written, {}, control, token_ids)
        read = TurnReader(grammar, {}, frozenset()).read(turn, tools)
        good = [call for call in read.tool_calls if call.status is CallStatus.OK and call.arguments != "{}"]
        if good:
            return tuple(good)
    return ()


def by_tags(control: ControlSet, text: str, *, spelled: bool = False) -> str:
    """Return the name of the grammar whose tags a text or the vocabulary has; empty if none is known.

    Args:
        control: the control strings; many vocabularies have `<tool_call>`, so the text must show it.
        text: what a template writes about tools, or its source.
        spelled: only grammars that can write calls, whose tags are in the vocabulary.
    """
    for grammar in GRAMMARS.values():
        tags = {tag for block in grammar.blocks[:1] for tag in (block.opens, block.closes) if tag}
        known = tags <= control.strings.keys()
        own = any(tag in text or (known and tag.startswith("<|")) for tag in tags)
        if own and (known and grammar.spell if spelled else grammar.name != "hermes"):
            return grammar.name
    return ""


def _inferred(text: str, call: Call) -> Iterator[Grammar]:
    from agentenv.render.parse.infer import inferred

    yield from inferred(text, *call)


def _reads(reader: TurnReader, text: str, expected: Sequence[Call], control: ControlSet) -> tuple[int, bool]:
    """Return 2 if the calls are read, 1 if parts of them are left, else 0, and whether values are texts.

    Some templates write every value as text.
    """
    places: dict[str, list[int]] = {}
    for position, string in control.positions(text):
        places.setdefault(string, []).append(position)
    read = reader.read(TurnText(text, places, control), ToolIndex.of([PROBE_TOOL]))
    found = [
        (call.name, json.loads(call.arguments)) for call in read.tool_calls if call.status is CallStatus.OK
    ]
    if len(read.tool_calls) != len(found) or list(map(_as_text, found)) != list(map(_as_text, expected)):
        return 0, False
    left = text_of(read.message)
    parts = _EMPTY_TAGS.search(left) or (reader.grammar.bare and left)
    return 1 if parts else 2, found != [(name, dict(arguments)) for name, arguments in expected]


def _as_text(call: Call) -> tuple[str, dict[str, str]]:
    return call[0], {key: str(value) for key, value in call[1].items()}
