"""Read calls that are written as JSON objects, with the raw text of each member.

Reading takes linear time, stops at a fixed nesting depth, and raises only `ValueError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from agentenv.core.messages import ArgumentError, CallStatus, decode, decode_at
from agentenv.render.parse.grammar import RawCall, Span, TurnText, WholeTurn, held
from agentenv.render.parse.values import MAX_DEPTH

__all__ = [
    "Member",
    "arguments_call",
    "bare_json",
    "call_of_members",
    "functionary_turn",
    "invalid",
    "json_calls",
    "json_items",
    "json_members",
    "json_object",
    "json_value",
    "one_json_call",
    "skip_space",
    "spell_json",
    "strip_fence",
    "too_deep",
]

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args")
_IDS = ("id", "tool_call_id")
_LOOKS = re.compile(r'\[?\s*\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?(?:name|tool_name|function)"\s*:')
"""Matches the beginning of a turn that was meant as a call."""


def one_json_call(turn: TurnText, span: Span) -> Sequence[RawCall]:
    """Read one `{"name": ..., "arguments": {...}}` and nothing else."""
    if tag := turn.sampled(span.start, span.end):
        return [held("", tag)]
    text = turn.text[span.start : span.end]
    try:
        members, end = json_members(text, within="function")
    except ValueError as error:
        return [_unread("the call is", error, text)]
    if (rest := skip_space(text, end)) < len(text):
        return [
            invalid(f"the call is not valid JSON: extra text at character {rest}; one object a call", text)
        ]
    return [call_of_members(members)]


def json_calls(turn: TurnText, span: Span) -> Sequence[RawCall]:
    """Read an array of call objects, or several call objects in a row."""
    if tag := turn.sampled(span.start, span.end):
        return [held("", tag)]
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
        return [_unread("the calls are", error, text)]
    if rest < len(text):
        return [invalid(f"the calls are not valid JSON: extra text at character {rest}", text)]
    return [call_of_members(members) for members in items]


def spell_json(call: Mapping[str, object]) -> str:
    """Write one call object."""
    return json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False)


def bare_json(text: str) -> tuple[Sequence[RawCall], int] | None:
    """Read call objects, in a row or in an array."""
    calls: list[RawCall] = []
    position = end = 0
    while text.startswith(("{", "["), position):
        try:
            items, position = json_items(text, position, within="function")
        except ValueError as error:
            if _LOOKS.match(text, position) is None:
                break
            return [*calls, invalid(f"the call is not valid JSON: {error}")], len(text)
        if not items or not all(_describes_call(members) for members in items):
            break
        calls += map(call_of_members, items)
        end = skip_space(text, position)
        end += text.startswith(";", end)
        position = skip_space(text, end)
    return (calls, end) if calls else None


def arguments_call(name: str, text: str, call_id: str = "") -> RawCall:
    """Return the call with this name and with arguments read from the text of a JSON object."""
    name = name.strip()
    raw = text.strip()
    if not name:
        return RawCall(status=CallStatus.MISSING_NAME, error="the call has no name")
    try:
        read, end = json_object(raw)
        if end < len(raw):
            raise ValueError(f"extra text at character {end}")
    except ValueError as error:
        said = f"the arguments of {name} are not a valid JSON object: {error}"
        return RawCall(name, raw, id=call_id, status=CallStatus.INVALID_JSON, error=said)
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
    if len(members) == 1 and not members.keys() & {*_NAMES, *_ARGUMENTS, *_IDS}:
        # Apertus writes the name as the key of the arguments.
        ((named, arguments),) = members.items()
        members = {"name": Member(named, named), "arguments": arguments}
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


def _unread(what: str, error: ValueError, text: str) -> RawCall:
    # A repair would take one of the two values for the one that was meant.
    return invalid(f"{what} not valid JSON: {error}", "" if isinstance(error, _Repeated) else text)


_SPACE = re.compile(r"[ \t\n\r]*")
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]', re.DOTALL)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


class _Repeated(ValueError):
    """A key is written twice, so it is not known which of its values was meant."""


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a JSON object."""

    value: object
    raw: str
    """Text of the value, exactly as it was written."""
    usable: bool = True
    """False for valid JSON that cannot be passed to a tool."""
    inner: Mapping[str, Member] | None = None
    """Members of the value, if they were requested with `within`."""

    @property
    def values(self) -> Mapping[str, Any] | None:
        """The value if it is an object that can be passed to a tool, else None."""
        return cast("dict[str, Any]", self.value) if self.usable and isinstance(self.value, dict) else None


def too_deep(text: str) -> bool:
    """Return True if JSON text is nested deeper than `MAX_DEPTH`, over which templates and tools recurse."""
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return False
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
        if depth > MAX_DEPTH:
            return True
    return False


def skip_space(text: str, start: int) -> int:
    """Return the first position at or after `start` that is not JSON white space."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


def json_value(text: str, start: int = 0) -> tuple[object, int]:
    """Read one JSON value; return it and the position after it.

    Raises:
        ValueError: The text there is not valid JSON; the message says what is wrong and where.
    """
    try:
        return _DECODER.raw_decode(text, skip_space(text, start))
    except RecursionError:
        raise ValueError("nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - start}") from None


def json_object(text: str, start: int = 0) -> tuple[Member, int]:
    """Read one JSON object; return it with its text and the position after it.

    Raises:
        ValueError: The text there is not a valid JSON object; the message says what is wrong and where.
    """
    position = skip_space(text, start)
    if not text.startswith("{", position):
        raise ValueError("a JSON object was expected")
    return _member(text, position)


def json_members(text: str, start: int = 0, *, within: str = "") -> tuple[dict[str, Member], int]:
    """Read one JSON object; return its members with their raw text and the position after it.

    Each member is decoded only once, in place; the arguments of a call are such a member.

    Args:
        text: the text to read from.
        start: the position to begin at.
        within: key of a member whose own members are returned too, as `Member.inner`.

    Raises:
        ValueError: The text there is not a valid JSON object; the message says what is wrong and where.
    """
    start = skip_space(text, start)
    if not text.startswith("{", start):
        raise ValueError("a JSON object was expected")
    members: dict[str, Member] = {}
    try:
        position, more = _opened(text, start, "}")
        while more:
            key, position = _key(text, position)
            if key in members:
                raise _Repeated(f"the key {json.dumps(key)[:80]} appears twice; write it once")
            if key == within and text.startswith("{", position):
                inner, end = json_members(text, position)
                values = {name: member.value for name, member in inner.items()}
                members[key], position = Member(values, text[position:end], inner=inner), end
            else:
                members[key], position = _member(text, position)
            position, more = _next(text, position, "}")
    except _Repeated:
        raise
    except (ValueError, RecursionError) as error:
        json_value(text, start)  # raises with the message of the decoder, which says what is wrong and where
        raise ValueError("nested too deep") from error
    return members, position


def json_items(text: str, start: int = 0, *, within: str = "") -> tuple[list[dict[str, Member]], int]:
    """Read a JSON array of objects, or one object; return their members and the position after.

    Raises:
        ValueError: The text there is neither an array of objects nor an object.
    """
    start = skip_space(text, start)
    if not text.startswith("[", start):
        members, end = json_members(text, start, within=within)
        return [members], end
    items: list[dict[str, Member]] = []
    try:
        position, more = _opened(text, start, "]")
        while more:
            members, position = json_members(text, position, within=within)
            items.append(members)
            position, more = _next(text, position, "]")
    except ValueError:
        json_value(text, start)  # raises if the whole is not JSON, which is the more useful message
        raise
    return items, position


def _opened(text: str, start: int, closes: str) -> tuple[int, bool]:
    """Step into an object or array; return the next position, and whether it has any members."""
    position = skip_space(text, start + 1)
    return (position + 1, False) if text.startswith(closes, position) else (position, True)


def _next(text: str, position: int, closes: str) -> tuple[int, bool]:
    """Step over the separator after a member; return the next position, and whether a member follows."""
    position = skip_space(text, position)
    if text.startswith(closes, position):
        return position + 1, False
    if not text.startswith(",", position):
        raise ValueError("a comma was expected")
    return skip_space(text, position + 1), True


def _key(text: str, position: int) -> tuple[str, int]:
    """Read a key and its colon; return the key and the position of its value."""
    if not text.startswith('"', position):
        raise ValueError("a key in double quotes was expected")
    key, position = json_value(text, position)
    position = skip_space(text, position)
    if not text.startswith(":", position):
        raise ValueError("a colon was expected")
    return cast("str", key), skip_space(text, position + 1)


def _member(text: str, position: int) -> tuple[Member, int]:
    try:
        value, end = decode_at(text, position)
    except (ValueError, RecursionError):
        # This is JSON that cannot be passed to a tool, such as a repeated key; the tool will say so.
        value, end = json_value(text, position)
        return Member(value, text[position:end], usable=False), end
    return Member(value, text[position:end]), end
