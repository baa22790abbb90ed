"""What chat APIs are sent: the form of a reply, images, tools as text, and what some of them refuse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentenv.core import ContentPart, Message, orphans_as_user, text_of
from agentenv.render import ReplyForm
from agentenv_providers.openai.reply import sent_back

__all__ = ["fields_of_form", "messages_for"]

WORDLESS = "(no text)"
"""What stands for an empty text at APIs that refuse one."""


def messages_for(messages: Sequence[Message], api: str, without: frozenset[str] | set[str]) -> list[Any]:
    """Return a conversation as an API is sent it.

    Args:
        messages: the conversation as it is recorded.
        api: name of the engine, which gets its own fields back.
        without: keys that the API refuses, such as "reasoning_content"; "empty text" and "broken arguments"
            stand for such texts, in whose place others are sent.
    """
    sent: list[Any] = []
    for message in with_images_of_users(orphans_as_user(messages)):
        back: Mapping[str, Any] = sent_back(message, api)
        if without:
            back = _accepted(back, without)
        if back["role"] != "assistant" or back.get("content") or back.keys() - {"role", "content"}:
            sent.append(back)  # an answer with nothing in it is refused by many, and says nothing
    return sent


def _accepted(message: Mapping[str, Any], without: frozenset[str] | set[str]) -> dict[str, Any]:
    """Return a message in the form that an API accepts."""
    kept = {key: value for key, value in message.items() if key not in without}
    if "empty text" in without and not kept.get("content"):
        kept["content"] = None if kept.get("tool_calls") else WORDLESS
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [_sendable(call, without) for call in calls]
    return kept


def _sendable(call: Mapping[str, Any], without: frozenset[str] | set[str]) -> dict[str, Any]:
    """Return a call without the keys that an API refuses, and with arguments that it can read."""
    kept = {key: value for key, value in call.items() if key not in without}
    if "broken arguments" in without and not is_object(arguments := call["function"]["arguments"]):
        kept["function"] = {**call["function"], "arguments": json.dumps({"unreadable": arguments})}
    return kept


def is_object(arguments: object) -> bool:
    """Return whether the arguments of a call are a JSON object."""
    return isinstance(arguments, Mapping) or (isinstance(arguments, str) and _is_object(arguments))


@lru_cache(maxsize=1024)  # each turn of a conversation asks again for all its calls
def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def fields_of_form(form: ReplyForm, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of a request that ask for a form.

    Source: https://platform.openai.com/docs/api-reference/chat/create

    Args:
        form: what the reply must be.
        tools: the tools that the request has; a choice among tools that are described in a text is no field.
    """
    fields: dict[str, Any] = {}
    named = [{"type": "function", "function": {"name": name}} for name in form.calls]
    if form.schema == {"type": "object"}:
        fields["response_format"] = {"type": "json_object"}
    elif form.schema is not None:
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "reply", "schema": form.schema},
        }
    if not tools:
        return fields
    if form.schema is not None:
        fields |= {} if form.calls else {"tool_choice": "none"}
    elif len(named) == 1:
        fields["tool_choice"] = named[0]
    elif len(named) == len(tools):
        fields["tool_choice"] = "required"
    else:
        allowed = {"mode": "required", "tools": named}
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    return fields if form.many else {**fields, "parallel_tool_calls": False}


# The API takes images in messages of the user only. So the images of tool messages are sent in a message of
# the user behind the tool messages of the turn. The records keep them where the tools returned them.
def with_images_of_users(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with the images of tools moved into messages of the user."""
    sent: list[Message] = []
    parts: list[ContentPart] = []
    for message in messages:
        if parts and message["role"] != "tool":
            sent.append({"role": "user", "content": parts})
            parts = []
        content = message.get("content")
        shown = content if message["role"] == "tool" and isinstance(content, list) else []
        images = [part for part in shown if part.get("type") == "image_url"]
        if not images:
            sent.append(message)
            continue
        source = message.get("name") or message.get("tool_call_id") or "the tool"
        parts.append({"type": "text", "text": f"What {source} returned:"})
        parts += images
        sent.append({**message, "content": text_of(message) or "(see the image)"})
    return [*sent, {"role": "user", "content": parts}] if parts else sent
