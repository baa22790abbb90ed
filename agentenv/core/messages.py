"""Chat messages, tool calls and tool results: what passes between model, tools and environment.

Messages keep OpenAI's chat shape as plain dictionaries, because chat templates, vLLM and every
OpenAI-compatible API eat them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NotRequired, TypeAlias, TypedDict

__all__ = [
    "CallStatus",
    "ContentPart",
    "FunctionCall",
    "JsonValue",
    "Message",
    "ToolCall",
    "ToolCallMessage",
    "ToolErrorKind",
    "ToolResult",
    "malformed",
    "not_run",
    "text_of",
]

JsonValue: TypeAlias = "str | int | float | bool | Sequence[JsonValue] | Mapping[str, JsonValue] | None"


class ContentPart(TypedDict, total=False):
    """One part of a message's content, as in OpenAI's chat API."""

    type: str
    text: str
    image_url: dict[str, str]


class FunctionCall(TypedDict):
    """The function part of a tool call in a message; `arguments` is JSON text as sampled."""

    name: str
    arguments: str


class ToolCallMessage(TypedDict):
    """A tool call inside an assistant message, in OpenAI's shape."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict):
    """A chat message in OpenAI's shape."""

    role: str
    content: NotRequired[str | list[ContentPart] | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallMessage]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


def text_of(message: Message) -> str:
    """Return the text of a message; parts that are not text are left out."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if part.get("type") == "text")


class CallStatus(StrEnum):
    """What the parser found about one tool call."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    """The call's text is not what its grammar asks for."""
    UNCLOSED = "unclosed"
    """The call has no end; it is never executed."""
    MISSING_NAME = "missing_name"
    """The call names no tool."""
    UNKNOWN_TOOL = "unknown_tool"
    """The call names a tool that the episode does not have."""
    BAD_ARGUMENTS = "bad_arguments"
    """The arguments are not an object, or cannot be read."""
    IN_THINKING = "in_thinking"
    """The call stands inside the model's thinking; it is not executed and not answered."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call as the model made it."""

    id: str
    name: str
    arguments: str
    """JSON text, exactly as sampled where the grammar is JSON."""
    status: CallStatus = CallStatus.OK
    error: str = ""
    """For the model: what is wrong with the call, when `status` is not ok."""
    values: Mapping[str, object] | None = field(default=None, compare=False, repr=False)
    """The arguments as Python values, where they were read already and are an object that a tool can take.
    Read only. They follow from `arguments`, so they are neither compared nor written to disk."""

    def to_message(self) -> ToolCallMessage:
        """Return the call in the shape of an assistant message's `tool_calls` entry."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }

    @classmethod
    def from_message(cls, call: ToolCallMessage) -> ToolCall:
        """Build a call from an assistant message's `tool_calls` entry."""
        function = call["function"]
        return cls(call["id"], function["name"], function["arguments"])


class ToolErrorKind(StrEnum):
    """Why a tool result is an error."""

    UNKNOWN_TOOL = "unknown_tool"
    INVALID_JSON = "invalid_json"
    BAD_ARGUMENTS = "bad_arguments"
    TOOL_ERROR = "tool_error"
    """The tool raised `ToolError`: its text is for the model."""
    EXCEPTION = "exception"
    """The tool raised something else: recorded with its traceback."""
    TIMEOUT = "timeout"
    NOT_RUN = "not_run"
    """A limit was reached before the call could run."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The one answer to one tool call."""

    tool_call_id: str
    name: str
    content: str | list[ContentPart]
    """What the model reads: text as is, everything else as JSON; images as content parts."""
    error_kind: ToolErrorKind | None = None
    detail: str = ""
    """For the record, not for the model: a traceback, or the reason in full."""
    duration_s: float = 0.0
    trimmed: bool = False
    """The content was shortened to fit a limit."""
    full_chars: int | None = None
    """Length of the content before it was trimmed."""
    repaired: bool = False
    """The call's broken JSON was repaired, because the toolbox was asked to."""
    max_tokens: int | None = None
    """The tool's own limit on its output; of this and the run's limit the stricter holds."""
    full_output: str = ""
    """File with the whole content that was cut, where the run keeps such files."""

    @property
    def is_error(self) -> bool:
        """True if the call failed or was not run."""
        return self.error_kind is not None

    @property
    def text(self) -> str:
        """The content as text; parts that are not text are left out."""
        return text_of({"role": "tool", "content": self.content})

    def to_message(self) -> Message:
        """Return the result as a tool message."""
        return {
            "role": "tool",
            "tool_call_id": self.tool_call_id,
            "name": self.name,
            "content": self.content,
        }


_ERROR_KINDS = {
    CallStatus.UNKNOWN_TOOL: ToolErrorKind.UNKNOWN_TOOL,
    CallStatus.BAD_ARGUMENTS: ToolErrorKind.BAD_ARGUMENTS,
    CallStatus.IN_THINKING: ToolErrorKind.NOT_RUN,
}
"""What a status makes of a call's result; every other one says that the call's text is broken."""


def malformed(call: ToolCall) -> ToolResult:
    """Tell the model what is wrong with a call that could not be read."""
    kind = _ERROR_KINDS.get(call.status, ToolErrorKind.INVALID_JSON)
    return ToolResult(call.id, call.name, call.error or f"malformed tool call: {call.status.value}", kind)


def not_run(call: ToolCall, why: str) -> ToolResult:
    """Tell the model why a call was not run."""
    return ToolResult(call.id, call.name, f"not run: {why}", ToolErrorKind.NOT_RUN)
