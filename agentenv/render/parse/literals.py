"""Read calls that are written like Python, or with literals of a model family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentenv.core.messages import CallStatus
from agentenv.render.parse.grammar import RawCall, Span, TurnText, as_arguments, held
from agentenv.render.parse.json_calls import Member, call_of_members, invalid, skip_space
from agentenv.render.parse.values import LiteralReader, unescaped

__all__ = ["NamedLiterals", "bare_literals", "bare_pythonic", "pythonic_calls", "spell_pythonic"]

_OBJECT = re.compile(r"\[?\s*\{\s*[\"'](?:name|tool_name|function)[\"']\s*:")
_LOOKS = re.compile(r"\[\s*[^\W\d][\w.\-]*\(")
_QUOTED_ALL = re.compile(
    r"""\s*\[?\s*(?P<name>[^\W\d][\w.\-]*)\(\s*(?P<key>\w+)\s*=\s*(?P<quote>['"])"""
    r"""(?P<value>(?:(?!(?P=quote)\s*(?:,\s*\w+\s*=|\)\s*[,;\]])).)*)(?P=quote)\s*\)\s*\]?\s*""",
    re.DOTALL,
)
"""Matches one call with one text, which ends at the last quote: another argument or call may follow none."""


def pythonic_calls(turn: TurnText, span: Span) -> Sequence[RawCall]:
    """Read `[f(a=1), g(b="x")]`, with or without the brackets."""
    if tag := turn.sampled(span.start, span.end):
        return [held("", tag)]
    text = turn.text[span.start : span.end]
    calls, end = _pythonic(text)
    extra = [invalid("extra text after the calls")] if skip_space(text, end) < len(text) else []
    return [*calls, *extra]


def spell_pythonic(calls: Sequence[Mapping[str, Any]]) -> str:
    """Write `[f(a=1), g(b="x")]`; values are JSON, which the reader takes, too."""
    listed: list[str] = []
    for call in calls:
        pairs = cast("Mapping[str, object]", call["arguments"]).items()
        values = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in pairs)
        listed.append(f"{call['name']}({values})")
    return f"[{', '.join(listed)}]"


def bare_pythonic(text: str) -> tuple[Sequence[RawCall], int] | None:
    """Read `[f(a=1), ...]`."""
    return _pythonic(text) if _LOOKS.match(text) else None


def bare_literals(text: str) -> tuple[Sequence[RawCall], int] | None:
    """Read call objects in Python's spelling, with or without brackets."""
    reader, items, end = LiteralReader(text), list[object](), 0
    while _OBJECT.match(text, position := skip_space(text, end + text.startswith(",", end))):
        try:
            value, end = reader.value(position)
        except (ValueError, RecursionError) as error:
            return [invalid(f"the call cannot be read: {error}")], len(text)
        items += cast("list[object]", value) if isinstance(value, list) else [value]
    calls: list[RawCall] = []
    for item in items:
        entry = cast("dict[str, object]", item) if isinstance(item, dict) else {}
        members = {key: _member(value) for key, value in entry.items()}
        calls.append(call_of_members(members))
    return (calls, end) if calls else None


@dataclass(frozen=True, slots=True)
class NamedLiterals:
    """Reads `call:NAME{key:value,...}`, in which quote tags enclose strings."""

    quote: str

    def __call__(self, turn: TurnText, span: Span) -> Sequence[RawCall]:
        """Read one call."""
        text = turn.text[span.start : span.end].strip().removeprefix("call:").removeprefix(":")
        brace = text.find("{")
        name = text[:brace].strip() if brace >= 0 else ""
        if not name:
            return [RawCall(status=CallStatus.MISSING_NAME, error="the call has no name")]
        if tag := turn.sampled(span.start, span.end, self.quote):
            return [held(name, tag)]
        try:
            arguments, end = LiteralReader(text, self.quote).pairs("}", ":", brace + 1)
        except (ValueError, RecursionError) as error:
            message = f"the arguments of {name} cannot be read: {error}"
            return [RawCall(name, status=CallStatus.BAD_ARGUMENTS, error=message)]
        if skip_space(text, end) < len(text):
            return [invalid(f"extra text after the call of {name}")]
        quoted = {key: True for key, value in arguments.items() if type(value) is str}
        return [RawCall(name, untyped=arguments, is_text=quoted)]


def _pythonic(text: str) -> tuple[list[RawCall], int]:
    """Return the calls, and where they end: at the end of the text if one of them cannot be read."""
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
                raise ValueError(f"'(' was expected after {name}")
            arguments, position = reader.pairs(")", "=", position + 1)
            calls.append(RawCall(name, *as_arguments(arguments)))
            position = skip_space(text, position)
            if text.startswith((",", ";"), position):
                position += 1
            elif not brackets:
                break
            elif not text.startswith("]", position):
                raise ValueError(f"',' or ']' was expected at character {position}")
    except (ValueError, RecursionError) as error:
        if whole := _QUOTED_ALL.fullmatch(text):  # quotes inside the text were not escaped
            arguments = as_arguments({whole["key"]: unescaped(whole["value"])})
            return [RawCall(whole["name"], *arguments)], len(text)
        error = invalid(f"the call is not valid: {error}; write [name(argument=value)]")
        return [*calls, error], len(text)
    return calls or [invalid("there is no call in the list")], position


def _member(value: object) -> Member:
    text, usable = as_arguments(value)
    return Member(value, text, usable=usable is not None)
