"""Readers for calls written like Python or with literals of a family's own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from agentenv.messages import CallStatus
from agentenv.render.parse.grammar import RawCall, Span
from agentenv.render.parse.json_calls import invalid
from agentenv.render.parse.scan import TurnText
from agentenv.render.parse.values import LiteralReader, skip_space

__all__ = ["bare_pythonic", "named_literals", "pythonic_calls"]

_LOOKS = re.compile(r"\[\s*[^\W\d][\w.\-]*\(")


def pythonic_calls(turn: TurnText, span: Span) -> Sequence[RawCall]:
    """Read `[f(a=1), g(b="x")]`, also without the brackets."""
    return _pythonic(turn.text[span.start : span.end])


def bare_pythonic(text: str) -> Sequence[RawCall] | None:
    """Read a turn that is nothing but `[f(a=1), ...]`."""
    stripped = text.strip()
    return _pythonic(stripped) if _LOOKS.match(stripped) else None


def named_literals(turn: TurnText, span: Span) -> Sequence[RawCall]:
    """Read `call:NAME{key:value,...}`, whose strings stand between `<|"|>` tags."""
    text = turn.text[span.start : span.end].strip().removeprefix("call:")
    reader = LiteralReader(text, '<|"|>')
    brace = text.find("{")
    name = text[:brace].strip() if brace >= 0 else ""
    if not name:
        return [RawCall(status=CallStatus.MISSING_NAME, error="the call has no name")]
    try:
        arguments, end = reader.pairs("}", ":", brace + 1)
    except (ValueError, RecursionError) as error:
        return [
            RawCall(
                name,
                status=CallStatus.BAD_ARGUMENTS,
                error=f"the arguments of {name} cannot be read: {error}",
            )
        ]
    if skip_space(text, end) < len(text):
        return [invalid(f"extra text after the call of {name}")]
    return [RawCall(name, _json(arguments))]


def _pythonic(text: str) -> list[RawCall]:
    reader = LiteralReader(text)
    calls: list[RawCall] = []
    position = skip_space(text, 0)
    brackets = text.startswith("[", position)
    position += brackets
    try:
        while True:
            position = skip_space(text, position)
            if brackets and text.startswith("]", position):
                position += 1
                break
            name, position = reader.name(position)
            if not text.startswith("(", position):
                raise ValueError(f"'(' was expected after {name}")  # noqa: TRY301
            arguments, position = reader.pairs(")", "=", position + 1)
            calls.append(RawCall(name, _json(arguments)))
            position = skip_space(text, position)
            if text.startswith((",", ";"), position):
                position += 1
            elif not brackets:
                break
            elif not text.startswith("]", position):
                raise ValueError(f"',' or ']' was expected at character {position}")
    except (ValueError, RecursionError) as error:
        return [*calls, invalid(f"the call is not valid: {error}; write [name(argument=value)]")]
    if skip_space(text, position) < len(text):
        return [*calls, invalid("extra text after the calls")]
    return calls or [invalid("there is no call in the list")]


def _json(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False)
