"""Read calls that are written as JSON objects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentenv.core.arguments import ArgumentError, decode
from agentenv.core.messages import CallStatus
from agentenv.render.parse.grammar import RawCall, Span, WholeTurn
from agentenv.render.parse.scan import TurnText
from agentenv.render.parse.values import Member, json_items, json_members, json_object, skip_space

__all__ = [
    "arguments_call",
    "bare_json",
    "call_of_members",
    "functionary_turn",
    "invalid",
    "json_calls",
    "one_json_call",
    "strip_fence",
]

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args")
_IDS = ("id", "tool_call_id")
_LOOKS = re.compile(r'\[?\s*\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?(?:name|tool_name|function)"\s*:')
"""Matches the beginning of a turn that was meant as a call."""


def one_json_call(turn: TurnText, span: Span) -> Sequence[RawCall]:
    """Read one `{"name": ..., "arguments": {...}}` and nothing else."""
    text = turn.text[span.start : span.end]
    try:
        members, end = json_members(text, within="function")
    except ValueError as error:
        return [invalid(f"the call is not valid JSON: {error}", text)]
    if (rest := skip_space(text, end)) < len(text):
        return [
            invalid(f"the call is not valid JSON: extra text at character {rest}; one object a call", text)
        ]
    return [call_of_members(members)]


def json_calls(turn: TurnText, span: Span) -> Sequence[RawCall]:
    """Read an array of call objects, or several call objects in a row."""
    text = turn.text[span.start : span.end]
    several = text.startswith("{", skip_space(text, 0))
    try:
        items, end = json_items(text, within="function")
        rest = skip_space(text, end)
        while several and text.startswith("{", rest):
            more, end = json_items(text, rest, within="function")
            items += more
            rest = skip_space(text, end)
    except ValueError as error:
        return [invalid(f"the calls are not valid JSON: {error}", text)]
    if rest < len(text):
        return [invalid(f"the calls are not valid JSON: extra text at character {rest}", text)]
    return [call_of_members(members) for members in items]


def bare_json(text: str) -> Sequence[RawCall] | None:
    """Read a turn that consists of call objects only, in a row or in an array."""
    stripped = text.strip().removesuffix(";")
    if not stripped.startswith(("{", "[")):
        return None
    calls: list[RawCall] = []
    position = 0
    while position < len(stripped):
        try:
            items, position = json_items(stripped, position, within="function")
        except ValueError as error:
            looks_like_a_call = _LOOKS.match(stripped) is not None
            return [*calls, invalid(f"the call is not valid JSON: {error}")] if looks_like_a_call else None
        found_calls = [call_of_members(members) for members in items]
        if not found_calls or not all(_describes_call(members) for members in items):
            return None
        calls += found_calls
        position = skip_space(stripped, position)
        if stripped.startswith(";", position):
            position = skip_space(stripped, position + 1)
    return calls


def arguments_call(name: str, text: str, call_id: str = "") -> RawCall:
    """Return the call with this name and with arguments read from the text of a JSON object."""
    name = name.strip()
    raw = text.strip()
    if not name:
        return RawCall(status=CallStatus.MISSING_NAME, error="the call has no name")
    try:
        read, end = json_object(raw)
    except ValueError as error:
        return RawCall(
            name,
            raw,
            id=call_id,
            status=CallStatus.INVALID_JSON,
            error=f"the arguments of {name} are not a valid JSON object: {error}",
        )
    if end < len(raw):
        return RawCall(
            name,
            raw,
            id=call_id,
            status=CallStatus.INVALID_JSON,
            error=f"the arguments of {name} are not valid JSON: extra text at character {end}",
        )
    return RawCall(name, raw, read.values, id=call_id)


def functionary_turn(turn: TurnText, *, ended: bool) -> WholeTurn:
    """Read `NAME` + line break + arguments, several of them joined by `>>>`; `all` is text."""
    content: list[str] = []
    calls: list[RawCall] = []
    sections = turn.text.split(">>>")
    for index, section in enumerate(sections):
        name, line, body = section.partition("\n")
        if not line and not section.strip():
            continue
        if name.strip() == "all" or not line:
            content.append(body if line else section)
            continue
        call = arguments_call(name, body)
        if call.status is CallStatus.INVALID_JSON and not ended and index == len(sections) - 1:
            error = "the call was cut off, so it was not run"
            call = RawCall(name, body, status=CallStatus.UNCLOSED, error=error)
        calls.append(replace(call, text=section.strip("\n")))
    return WholeTurn("\n".join(content).strip("\n"), "", tuple(calls))


def strip_fence(text: str) -> str:
    """Return the text inside a Markdown fence, or the whole text if there is no fence."""
    stripped = text.strip()
    if stripped.startswith("```") and stripped.endswith("```") and len(stripped) >= 6:
        return stripped[3:-3].removeprefix("json").strip()
    return stripped


def call_of_members(members: Mapping[str, Member]) -> RawCall:
    """Return the call that a JSON object describes."""
    function = members.get("function")
    if function is not None and isinstance(function.value, dict):
        inner = json_members(function.raw)[0] if function.inner is None else function.inner
        members = {**inner, **{key: members[key] for key in _IDS if key in members}}
    name = next((members[key].value for key in _NAMES if key in members), "")
    if not isinstance(name, str) or not name:
        return RawCall(status=CallStatus.MISSING_NAME, error='the call has no "name"')
    call_id = next((str(members[key].value) for key in _IDS if key in members), "")
    member = next((members[key] for key in _ARGUMENTS if key in members), None)
    if member is None:
        return RawCall(name, "{}", {}, id=call_id)
    arguments = _object(member)
    if arguments is None:
        return RawCall(
            name,
            member.raw,
            id=call_id,
            status=CallStatus.BAD_ARGUMENTS,
            error=f"the arguments of {name} are not a JSON object",
        )
    return RawCall(name, *arguments, id=call_id)


def _describes_call(members: Mapping[str, Member]) -> bool:
    named = any(key in members and isinstance(members[key].value, str) for key in _NAMES)
    return named and any(key in members for key in _ARGUMENTS)


def _object(member: Member) -> tuple[str, Mapping[str, Any] | None] | None:
    """Return the text and the values of an object, which may also be written as a JSON string."""
    if isinstance(member.value, dict):
        return member.raw, member.values
    if isinstance(member.value, str):
        try:
            values: Any = decode(member.value)
        except ArgumentError:
            return (member.value, None) if _is_object(member.value) else None
        return (member.value, values) if isinstance(values, dict) else None
    return None


def _is_object(text: str) -> bool:
    """Return True if Python reads the text as a JSON object, for which tools have stricter rules."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def invalid(error: str, text: str = "") -> RawCall:
    """Return a call that its grammar cannot read; the text is kept, because it may be repairable."""
    return RawCall(arguments=text.strip(), status=CallStatus.INVALID_JSON, error=error)
