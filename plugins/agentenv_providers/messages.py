"""Conversations in pydantic-ai's classes, and its responses as messages."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic_ai.messages import (
    BinaryContent,
    ImageUrl,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.tools import ToolDefinition

from agentenv.core import PROVIDER_FIELDS, JsonValue, Message, ToolCall, text_of

__all__ = ["definitions", "history", "message_of"]


def definitions(tools: Sequence[Mapping[str, JsonValue]]) -> list[Any]:
    """Return tools as pydantic-ai describes them; their schemas are sent as they are."""
    functions = [cast("Mapping[str, Any]", tool["function"]) for tool in tools]
    return [
        ToolDefinition(
            name=function["name"],
            description=function.get("description"),
            parameters_json_schema=dict(function.get("parameters") or {"type": "object", "properties": {}}),
            strict=False,
        )
        for function in functions
    ]


def history(messages: Sequence[Message], name: str) -> list[Any]:
    """Return a conversation; what `name` said before goes back as it said it."""
    told: list[Any] = []
    names: dict[str, str] = {}
    for message in messages:
        if message["role"] == "assistant":
            names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
            if (said := _said(message, name)).parts:
                told.append(said)
            continue
        part = _part(message, names)
        # Providers want the results of all calls of a turn in one message.
        if told and isinstance(last := told[-1], ModelRequest):
            told[-1] = ModelRequest([*last.parts, part])
        else:
            told.append(ModelRequest([part]))
    return told


def _part(message: Message, names: Mapping[str, str]) -> Any:
    content, text = _content(message), text_of(message)
    if message["role"] in {"system", "developer"}:
        return SystemPromptPart(text)
    call_id = message.get("tool_call_id", "")
    if message["role"] == "tool" and call_id in names:
        return ToolReturnPart(names[call_id], text if isinstance(content, str) else content, call_id)
    return UserPromptPart(content)


def _content(message: Message) -> str | list[Any]:
    """Return content with its images; plain text where there are none."""
    content = message.get("content")
    if not isinstance(content, list) or all(part.get("type") == "text" for part in content):
        return text_of(message)
    return [
        _image(part["image_url"]["url"]) if part.get("type") == "image_url" else part.get("text", "")
        for part in cast("list[Any]", content)
    ]


def _image(url: str) -> Any:
    kind, comma, data = url.removeprefix("data:").partition(";base64,")
    return BinaryContent(base64.b64decode(data), media_type=kind) if comma else ImageUrl(url)


def _said(message: Message, name: str) -> Any:
    """Return what the model said, as the provider said it unless the message was changed since."""
    plain = cast("Any", {key: value for key, value in message.items() if key != PROVIDER_FIELDS})
    kept: Any = message.get(PROVIDER_FIELDS) or {}
    if kept.get("api") == name:
        (said,) = ModelMessagesTypeAdapter.validate_python([kept["fields"]])
        assert isinstance(said, ModelResponse)
        calls = [part for part in said.parts if isinstance(part, ToolCallPart)]
        ids = [call["id"] for call in message.get("tool_calls") or ()]
        if len(calls) == len(ids):
            for part, id in zip(calls, ids, strict=True):
                part.tool_call_id = id
        if {**message_of(said, name), PROVIDER_FIELDS: None} == {**plain, PROVIDER_FIELDS: None}:
            return said
    text = text_of(message)
    calls = [
        ToolCallPart(call["function"]["name"], call["function"]["arguments"], call["id"])
        for call in message.get("tool_calls") or ()
    ]
    return ModelResponse([*([TextPart(text)] if text else []), *calls])


def message_of(response: Any, name: str) -> Message:
    """Return a response as a message."""
    parts = response.parts
    message: Message = {
        "role": "assistant",
        "content": "".join(part.content for part in parts if isinstance(part, TextPart)),
    }
    thinking = "".join(part.content for part in parts if isinstance(part, ThinkingPart))
    if thinking:
        message["reasoning_content"] = thinking
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    if calls:
        made = [ToolCall(part.tool_call_id, part.tool_name, _arguments(part)) for part in calls]
        message["tool_calls"] = [call.to_message() for call in made]
    # Thinking, native tools and signatures are more than our message holds of them.
    plain = (part for part in parts if isinstance(part, (TextPart, ToolCallPart)))
    if len(parts) > len([part for part in plain if not (part.provider_details or part.id)]):
        (fields,) = ModelMessagesTypeAdapter.dump_python([response], mode="json")
        message[PROVIDER_FIELDS] = {"api": name, "fields": fields}
    return message


def _arguments(part: Any) -> str:
    if isinstance(part.args, str):
        return part.args or "{}"
    return json.dumps(part.args or {})
