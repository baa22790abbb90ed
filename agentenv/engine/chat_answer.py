"""What is sent to chat APIs, and their answers, which differ in finish reasons, reasoning and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentenv.core.messages import (
    ArgumentError,
    ContentPart,
    Message,
    ToolCallMessage,
    chat_call,
    decode,
    distinct_calls,
    images_in,
    text_of,
)
from agentenv.core.visible import logger
from agentenv.engine.base import FinishReason
from agentenv.render.base import ReplyForm

__all__ = ["fields_of_form", "finish_of", "joined", "message_in", "with_images_of_users"]

CUT = {"length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"}
"""Finish reasons of answers that a limit cut off."""
ENDED = {
    "",
    "stop",
    "tool_calls",
    "function_call",
    "content_filter",
    "eos",
    "eos_token",
    "end_turn",
    "stop_sequence",
    "tool_use",
    "end",
    "complete",
    "refusal",
    "safety",
}
"""Finish reasons of answers that no limit cut off. What a filter leaves of an answer is the answer."""
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)

_log = logger(__name__)


def finish_of(reason: str | None, name: str) -> FinishReason:
    """Return the finish reason in our words; one that is not known counts as "stop", after a warning."""
    lower = (reason or "").lower()
    if lower in CUT:
        return "length"
    if lower not in ENDED:
        _log.warning("%s ended an answer with the unknown finish reason %r, read as 'stop'", name, reason)
    return "stop"


def message_in(answered: Mapping[str, Any], *, text_tools: bool) -> Message:
    """Return an answer of the API as a message; its tool calls get distinct ids.

    Args:
        answered: the message of the API's answer.
        text_tools: read calls from the text if there are no others.
    """
    text = answered.get("content") or answered.get("refusal") or ""
    message: Message = {"role": "assistant", "content": text}
    if thought := thinking(answered):
        message["reasoning_content"] = thought
    calls = [call_message(call, index) for index, call in enumerate(answered.get("tool_calls") or ())]
    function = answered.get("function_call")
    if function and not calls:
        # The form of a single call before there were lists of calls; some servers still use it.
        calls = [call_message({"function": function}, 0)]
    if text_tools and not calls:
        message["content"], calls = calls_in(text)
    if calls:
        message["tool_calls"] = distinct_calls(calls)
    return message


def thinking(said: Mapping[str, Any]) -> str:
    """Return the reasoning text of a message or of a piece of one; APIs have two names for it."""
    for name in ("reasoning_content", "reasoning"):
        text = said.get(name)
        if isinstance(text, str) and text:
            return text
    return ""


def call_message(call: Mapping[str, Any], index: int) -> ToolCallMessage:
    """Return a tool call of the API as a message entry; a call without id gets one."""
    function = call["function"]
    name, arguments = function.get("name") or "", function.get("arguments") or ""
    return chat_call(call.get("id") or f"call_{index}", name, arguments)


def calls_in(text: str) -> tuple[str, list[ToolCallMessage]]:
    """Return a text without its valid `<tool_call>` blocks, and the calls from these blocks."""
    calls: list[ToolCallMessage] = []

    def read(match: re.Match[str]) -> str:
        try:
            written = decode(match.group(1))
            name, arguments = str(written["name"]), json.dumps(written.get("arguments", {}))
        except (ArgumentError, KeyError):
            return match.group(0)
        calls.append(chat_call(f"call_{len(calls)}", name, arguments))
        return ""

    return CALL.sub(read, text).strip(), calls


async def joined(chunks: AsyncIterator[Any]) -> dict[str, Any]:
    """Join the chunks of a streamed answer into one answer of the usual form.

    Raises:
        EOFError: The stream ended in the middle of the answer.
    """
    pieces = Pieces()
    finish: str | None = None
    usage: Any = None
    whole = False
    async for chunk in chunks:
        choices = chunk.get("choices")
        usage = chunk.get("usage") or usage
        # The counts of the whole answer come last, in a chunk of their own.
        whole = usage is not None and not choices
        for choice in choices or ():
            finish = choice.get("finish_reason") or finish
            if delta := choice.get("delta"):
                pieces.add(delta)
    if finish is None and not whole:
        raise EOFError("the stream ended in the middle of the answer")
    return {"choices": [{"message": pieces.message(), "finish_reason": finish}], "usage": usage}


@dataclass(slots=True)
class Pieces:
    """The pieces of a streamed message so far."""

    content: list[str] = field(default_factory=list[str])
    refusal: list[str] = field(default_factory=list[str])
    thought: list[str] = field(default_factory=list[str])
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    function: dict[str, str] | None = None
    """The call in the form of a single call, as it was before there were lists of calls."""

    def add(self, delta: Mapping[str, Any]) -> None:
        """Add the next piece."""
        self.content.append(delta.get("content") or "")
        self.refusal.append(delta.get("refusal") or "")
        self.thought.append(thinking(delta))
        for part in delta.get("tool_calls") or ():
            add_call_part(self.calls, part)
        if function := delta.get("function_call"):
            self.function = self.function or {"name": "", "arguments": ""}
            add_function_part(self.function, function)

    def message(self) -> dict[str, Any]:
        """Return the whole message, in the form of an answer that is not streamed."""
        return {
            "content": "".join(self.content),
            "refusal": "".join(self.refusal),
            "reasoning_content": "".join(self.thought),
            "tool_calls": sorted(self.calls, key=lambda call: call["index"]),
            "function_call": self.function,
        }


def add_call_part(calls: list[dict[str, Any]], part: Mapping[str, Any]) -> None:
    """Add a streamed piece of a tool call to the pieces before it."""
    index = part.get("index") or 0
    id, function = part.get("id") or "", part.get("function")
    call = next((call for call in reversed(calls) if call["index"] == index), None)
    # Some servers give all calls the same index, and some give each piece of a call another id. A piece with
    # both a new id and a name begins a new call.
    named = function and function.get("name")
    if call is None or (named and call["function"]["name"] and id and id != call["id"]):
        new: dict[str, Any] = {"index": index, "id": "", "function": {"name": "", "arguments": ""}}
        calls.append(call := new)
    call["id"] = call["id"] or id
    if function:
        add_function_part(call["function"], function)


def add_function_part(function: dict[str, str], part: Mapping[str, Any]) -> None:
    """Add a streamed piece of a function's name and arguments to the pieces before it."""
    function["name"] += part.get("name") or ""
    function["arguments"] += part.get("arguments") or ""


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
    if not any(message["role"] == "tool" and images_in(message.get("content")) for message in messages):
        return messages
    sent: list[Message] = []
    parts: list[ContentPart] = []
    for message in messages:
        if message["role"] != "tool":
            _flush(parts, sent)
            sent.append(message)
            continue
        images = _images(message)
        sent.append({**message, "content": text_of(message) or "(see the image)"} if images else message)
        parts += images
    _flush(parts, sent)
    return sent


def _images(message: Message) -> list[ContentPart]:
    """Return a tool message's images behind a text that names the tool; an empty list if it has none."""
    content = message.get("content")
    if not isinstance(content, list) or not images_in(content):
        return []
    source = message.get("name") or message.get("tool_call_id") or "the tool"
    images = [part for part in content if part.get("type") == "image_url"]
    return [{"type": "text", "text": f"What {source} returned:"}, *images]


def _flush(parts: list[ContentPart], sent: list[Message]) -> None:
    if parts:
        sent.append({"role": "user", "content": list(parts)})
        parts.clear()
