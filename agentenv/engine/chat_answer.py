"""Reads the answers of chat APIs, which differ in their finish reasons, reasoning text and tool calls."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from agentenv.core.messages import Message, ToolCallMessage
from agentenv.engine.base import FinishReason

__all__ = ["distinct_calls", "finish_of", "joined", "message_in"]

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

_log = logging.getLogger(__name__)


def finish_of(reason: str | None, name: str) -> FinishReason:
    """Return the finish reason in our words; one that is not known counts as "stop", after a warning."""
    lower = (reason or "").lower()
    if lower in CUT:
        return "length"
    if lower not in ENDED:
        _log.warning("%s ended an answer with the unknown finish reason %r, read as 'stop'", name, reason)
    return "stop"


def message_in(answered: Any, *, text_tools: bool) -> Message:
    """Return an answer of the API as a message; its tool calls get distinct ids.

    Args:
        answered: the message of the API's answer.
        text_tools: read calls from the text if there are no others.
    """
    text = answered.content or getattr(answered, "refusal", None) or ""
    message: Message = {"role": "assistant", "content": text}
    if thought := thinking(answered):
        message["reasoning_content"] = thought
    calls = [call_message(call, index) for index, call in enumerate(answered.tool_calls or ())]
    function = getattr(answered, "function_call", None)
    if function is not None and not calls:
        # The form of a single call before there were lists of calls; some servers still use it.
        calls = [call_message(SimpleNamespace(id="", function=function), 0)]
    if text_tools and not calls:
        message["content"], calls = calls_in(text)
    if calls:
        message["tool_calls"] = distinct_calls(calls)
    return message


def distinct_calls(calls: Sequence[ToolCallMessage]) -> list[ToolCallMessage]:
    """Return the calls with distinct ids: results are matched by id, and some servers repeat ids."""
    given = {call["id"] for call in calls}
    taken: set[str] = set()
    renamed: list[ToolCallMessage] = []
    for index, call in enumerate(calls):
        new = call["id"]
        while new in taken:
            new = f"{new}_{index}"
            if new in given:
                new += "_"
        taken.add(new)
        renamed.append(call if new == call["id"] else {**call, "id": new})
    return renamed


def thinking(said: Any) -> str:
    """Return the reasoning text of a message or of a piece of one; APIs have two names for it."""
    for name in ("reasoning_content", "reasoning"):
        text = getattr(said, name, None)
        if isinstance(text, str) and text:
            return text
    return ""


def call_message(call: Any, index: int) -> ToolCallMessage:
    """Return a tool call of the API as a message entry; a call without id gets one."""
    function = call.function
    return {
        "id": call.id or f"call_{index}",
        "type": "function",
        "function": {"name": function.name or "", "arguments": function.arguments or ""},
    }


def calls_in(text: str) -> tuple[str, list[ToolCallMessage]]:
    """Return a text without its valid `<tool_call>` blocks, and the calls from these blocks."""
    calls: list[ToolCallMessage] = []

    def read(match: re.Match[str]) -> str:
        try:
            written = json.loads(match.group(1))
            name, arguments = str(written["name"]), json.dumps(written.get("arguments", {}))
        except (ValueError, KeyError):
            return match.group(0)
        calls.append(
            {
                "id": f"call_{len(calls)}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
        return ""

    return CALL.sub(read, text).strip(), calls


async def joined(chunks: AsyncIterator[Any]) -> Any:
    """Join the chunks of a streamed answer into one answer of the usual form.

    Raises:
        ConnectionError: The stream ended in the middle of the answer.
    """
    pieces = Pieces()
    finish: str | None = None
    usage: Any = None
    whole = False
    async for chunk in chunks:
        usage = getattr(chunk, "usage", None) or usage
        # The counts of the whole answer come last, in a chunk of their own.
        whole = usage is not None and not chunk.choices
        for choice in chunk.choices or ():
            finish = choice.finish_reason or finish
            if choice.delta is not None:
                pieces.add(choice.delta)
    if finish is None and not whole:
        raise ConnectionError("the stream ended in the middle of the answer")
    return SimpleNamespace(
        choices=[SimpleNamespace(message=pieces.message(), finish_reason=finish)], usage=usage
    )


@dataclass(slots=True)
class Pieces:
    """The pieces of a streamed message so far."""

    content: list[str] = field(default_factory=list[str])
    refusal: list[str] = field(default_factory=list[str])
    thought: list[str] = field(default_factory=list[str])
    calls: list[Any] = field(default_factory=list[Any])
    function: Any = None
    """The call in the form of a single call, as it was before there were lists of calls."""

    def add(self, delta: Any) -> None:
        """Add the next piece."""
        self.content.append(delta.content or "")
        self.refusal.append(getattr(delta, "refusal", None) or "")
        self.thought.append(thinking(delta))
        for part in delta.tool_calls or ():
            add_call_part(self.calls, part)
        function = getattr(delta, "function_call", None)
        if function is not None:
            self.function = self.function or SimpleNamespace(name="", arguments="")
            add_function_part(self.function, function)

    def message(self) -> Any:
        """Return the whole message, in the form of an answer that is not streamed."""
        return SimpleNamespace(
            content="".join(self.content),
            refusal="".join(self.refusal),
            reasoning_content="".join(self.thought),
            tool_calls=sorted(self.calls, key=lambda call: call.index),
            function_call=self.function,
        )


def add_call_part(calls: list[Any], part: Any) -> None:
    """Add a streamed piece of a tool call to the pieces before it."""
    index = part.index or 0
    call = next((call for call in reversed(calls) if call.index == index), None)
    # Some servers give all calls the same index, and some give each piece of a call another id. A piece with
    # both a new id and a name begins a new call.
    named = part.function is not None and part.function.name
    if call is None or (named and call.function.name and part.id and part.id != call.id):
        call = SimpleNamespace(index=index, id="", function=SimpleNamespace(name="", arguments=""))
        calls.append(call)
    call.id = call.id or part.id or ""
    if part.function is not None:
        add_function_part(call.function, part.function)


def add_function_part(function: Any, part: Any) -> None:
    """Add a streamed piece of a function's name and arguments to the pieces before it."""
    function.name += part.name or ""
    function.arguments += part.arguments or ""
