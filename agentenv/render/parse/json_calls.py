"""Readers for calls written as JSON objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from agentenv.messages import CallStatus
from agentenv.render.parse.grammar import RawCall, Span
from agentenv.render.parse.scan import TurnText
from agentenv.render.parse.values import Member, json_members, skip_space

__all__ = ["call_of_members", "one_json_call"]

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args")
_IDS = ("id", "tool_call_id")


def one_json_call(turn: TurnText, span: Span) -> Sequence[RawCall]:
    """Read one `{"name": ..., "arguments": {...}}` and nothing else."""
    text = turn.text[span.start : span.end]
    try:
        members, end = json_members(text)
    except ValueError as error:
        return [_invalid(f"the call is not valid JSON: {error}")]
    if (rest := skip_space(text, end)) < len(text):
        return [_invalid(f"the call is not valid JSON: extra text at character {rest}; one object a call")]
    return [call_of_members(members)]


def call_of_members(members: Mapping[str, Member]) -> RawCall:
    """Return the call that a JSON object describes."""
    name = next((members[key].value for key in _NAMES if key in members), "")
    if not isinstance(name, str) or not name:
        return RawCall(status=CallStatus.MISSING_NAME, error='the call has no "name"')
    call_id = next((str(members[key].value) for key in _IDS if key in members), "")
    member = next((members[key] for key in _ARGUMENTS if key in members), None)
    raw = "{}" if member is None else _object_text(member)
    if raw is None:
        return RawCall(
            name,
            "{}" if member is None else member.raw,
            id=call_id,
            status=CallStatus.BAD_ARGUMENTS,
            error=f"the arguments of {name} are not a JSON object",
        )
    return RawCall(name, raw, id=call_id)


def _object_text(member: Member) -> str | None:
    """Return JSON text of an object; also of one that was written as a JSON string."""
    if isinstance(member.value, dict):
        return member.raw
    if isinstance(member.value, str):
        try:
            inner = json.loads(member.value)
        except (ValueError, RecursionError):
            return None
        return member.value if isinstance(inner, dict) else None
    return None


def _invalid(error: str) -> RawCall:
    return RawCall(status=CallStatus.INVALID_JSON, error=error)
