"""Find the grammar of a template by rendering a call and recognising it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from agentenv.messages import CallStatus
from agentenv.render.control import ControlSet
from agentenv.render.parse.grammar import Block, Grammar, ToolIndex
from agentenv.render.parse.json_calls import json_calls
from agentenv.render.parse.library import GRAMMARS
from agentenv.render.parse.scan import TurnText
from agentenv.render.parse.turn import TurnReader
from agentenv.render.parse.values import json_items

__all__ = ["recognise"]


def recognise(
    written: Sequence[str],
    expected: Sequence[tuple[str, Mapping[str, object]]],
    tools: Sequence[Mapping[str, object]],
    control: ControlSet,
) -> Grammar | None:
    """Return the first grammar that reads the calls back, or None.

    Args:
        written: the call as a template writes it, from likely starts of the turn.
        expected: names and arguments that were rendered.
        tools: schemas that the names and arguments belong to.
        control: the vocabulary's control strings.
    """
    for text in written:
        inferred = _infer(text, expected[0][0])
        for grammar in (*GRAMMARS.values(), *([inferred] if inferred else [])):
            if _reads(grammar, text, expected, tools, control):
                return grammar
    return None


def _reads(
    grammar: Grammar,
    text: str,
    expected: Sequence[tuple[str, Mapping[str, object]]],
    tools: Sequence[Mapping[str, object]],
    control: ControlSet,
) -> bool:
    places: dict[str, list[int]] = {}
    for position, string in control.finditer(text):
        places.setdefault(string, []).append(position)
    turn = TurnText(text, places, control.strings)
    found = TurnReader(grammar, control.strings, frozenset()).read(turn, ToolIndex.of(tools), b"").tool_calls
    if len(found) != len(expected):
        return False
    return all(
        call.status is CallStatus.OK and call.name == name and _same(json.loads(call.arguments), arguments)
        for call, (name, arguments) in zip(found, expected, strict=True)
    )


def _same(read: Mapping[str, object], rendered: Mapping[str, object]) -> bool:
    """True if arguments agree; some templates write every value as text."""
    return {key: str(value) for key, value in read.items()} == {
        key: str(value) for key, value in rendered.items()
    }


def _infer(text: str, name: str) -> Grammar | None:
    """Make a grammar from a JSON call that stands between two tags nobody listed."""
    at = text.find(f'"{name}"')
    start = text.rfind("{", 0, at) if at >= 0 else -1
    if start < 0:
        return None
    if (bracket := text[:start].rstrip()).endswith("["):
        start = len(bracket) - 1
    try:
        _, end = json_items(text, start)
    except ValueError:
        return None
    before = text[:start].strip().split("\n")[-1].strip()
    after = text[end:].strip().split("\n")[0].strip()
    opens = before[before.rfind("<") :] if "<" in before else before
    if len(opens) < 3 or opens.isalnum():
        return None
    return Grammar(f"json between {opens} and {after}", (Block(opens, after, json_calls),))
