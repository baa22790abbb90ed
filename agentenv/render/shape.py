"""Bring messages, calls and their ids into the form in which a template reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import cast

from agentenv.core.errors import RenderError
from agentenv.core.messages import CallStatus, Message, ToolCall
from agentenv.render.tail import Habits, Plain
from agentenv.render.vision.splice import Splicer

__all__ = ["answered", "nine", "parted", "renamed", "shaped", "strings", "taken_ids"]


def shaped(message: Message, content: str, habits: Habits, *, as_text: bool) -> Plain:
    """Return a message in the form that the template expects.

    Args:
        message: the message.
        content: its content as text.
        habits: what the template needs.
        as_text: whether arguments are JSON text whatever the template needs.
    """
    plain: Plain = {key: value for key, value in message.items() if key not in {"content", "tool_calls"}}
    if habits.nine_ids and "tool_call_id" in plain:
        plain["tool_call_id"] = nine(plain["tool_call_id"])
    plain["content"] = content
    if not (calls := message.get("tool_calls")):
        return plain
    if not content and habits.null_content:
        plain["content"] = None
    as_text = as_text or habits.json_arguments
    plain["tool_calls"] = [
        {
            "id": nine(call["id"]) if habits.nine_ids else call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": _arguments(call["function"]["arguments"], as_text=as_text),
            },
        }
        for call in calls
    ]
    return plain


def _arguments(arguments: object, *, as_text: bool) -> object:
    """Return the arguments of a call as JSON text or as values."""
    if as_text:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def parted(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """Return messages without a last one of the assistant, and the text with which it begins the reply.

    Raises:
        RenderError: The last message has calls, which must be answered first.
    """
    if not messages or messages[-1]["role"] != "assistant":
        return messages, ""
    if messages[-1].get("tool_calls"):
        raise RenderError(
            "the last message calls tools, and no message answers the calls",
            remedy="send a message with the result of each call after it",
        )
    return messages[:-1], Splicer(None, "a reply begins with text", ()).text(messages[-1])


def answered(tool_calls: Sequence[ToolCall], new_messages: Sequence[Message]) -> list[Plain]:
    """Return the calls that the leading tool messages answer, in the order of those messages."""
    names = {call.id: call.name for call in tool_calls if call.status is not CallStatus.IN_THINKING}
    answered: list[Plain] = []
    for message in new_messages:
        if message["role"] != "tool":
            break
        call_id = message.get("tool_call_id", "")
        answered.append({"id": call_id, "name": names.get(call_id) or message.get("name") or "unknown"})
    return answered


def taken_ids(messages: Sequence[Plain]) -> set[object]:
    """Return the ids of earlier calls."""
    calls = [cast("list[Plain]", message.get("tool_calls") or []) for message in messages]
    return {call.get("id") for turn in calls for call in turn}


def renamed(entries: Sequence[Plain], key: str, taken: set[object]) -> list[Plain]:
    """Return calls or results with new ids where their ids were already used by earlier calls.

    Call ids are derived from the completion, so a completion that is sampled twice repeats its ids.
    """
    return [
        {**entry, key: nine(f"{entry[key]}/{len(taken)}")} if entry.get(key) in taken else entry
        for entry in entries
    ]


def nine(call_id: object) -> str:
    """Return a call id of nine letters and digits; an id that has this form is not changed."""
    text = str(call_id)
    if len(text) == 9 and text.isascii() and text.isalnum():
        return text
    return blake2b(text.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


def strings(value: object) -> list[str]:
    """Return every string inside messages and schemas."""
    found: list[str] = []
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, (dict, Mapping)):
            entries = cast("Mapping[object, object]", value)
            waiting += entries.keys()
            waiting += entries.values()
        elif isinstance(value, (list, tuple)):
            waiting += cast("Sequence[object]", value)
    return found
