"""Chat messages, tool calls with their JSON arguments, and tool results.

Messages are plain dictionaries in OpenAI's chat shape, because chat templates, vLLM and every
OpenAI-compatible API accept them unchanged.

Nothing is guessed silently when arguments are parsed. A repeated key, a number that JSON does not have (such
as NaN), text that is not valid Unicode and oversized arguments are refused with one line for the model. The
parser of completions, the conversations with chat APIs and the tools all parse with `decode`. The first of
them to parse a call stores the values in `ToolCall.values`, so that the arguments are parsed only once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Any, Final, Literal, NotRequired, TypeAlias, TypedDict, cast

__all__ = [
    "IMAGE_TOKENS",
    "MAX_ARGUMENT_CHARS",
    "PROVIDER_FIELDS",
    "ArgumentError",
    "CallStatus",
    "ContentPart",
    "FunctionCall",
    "JsonValue",
    "Message",
    "ToolCall",
    "ToolCallMessage",
    "ToolErrorKind",
    "ToolResult",
    "chat_call",
    "check_text",
    "copy_of",
    "decode",
    "decode_at",
    "distinct_calls",
    "image_parts",
    "images_in",
    "orphans_as_user",
    "text_of",
    "without_hints",
    "without_provider_fields",
]

JsonValue: TypeAlias = "str | int | float | bool | Sequence[JsonValue] | Mapping[str, JsonValue] | None"


IMAGE_TOKENS = 1_000
"""About what a model reads for an image of a megapixel; an estimate, where nobody has counted yet."""


class ContentPart(TypedDict, total=False):
    """One part of a message's content, as in OpenAI's chat API."""

    type: str
    text: str
    image_url: dict[str, str]
    hint: bool
    """True for a text of the first observation that only a teacher is shown; see `without_hints`."""


class FunctionCall(TypedDict):
    """The function part of a tool call in a message; `arguments` is JSON text as sampled."""

    name: str
    arguments: str


class ToolCallMessage(TypedDict):
    """A tool call inside an assistant message, in OpenAI's shape."""

    id: str
    type: Literal["function"]
    function: FunctionCall


def chat_call(id: str, name: str, arguments: str) -> ToolCallMessage:
    """Return a tool call in OpenAI's shape; `arguments` is JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


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


PROVIDER_FIELDS: Final = "provider_specific_fields"
"""Key of what a chat API said in its own form, such as signatures; it goes back to the same API only."""


class Message(TypedDict):
    """A chat message in OpenAI's shape."""

    role: str
    content: NotRequired[str | list[ContentPart] | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallMessage]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    provider_specific_fields: NotRequired[dict[str, Any]]


def without_provider_fields(message: Message) -> Message:
    """Return a message without what only the API knows that said it."""
    if PROVIDER_FIELDS not in message:
        return message
    return cast("Message", {key: value for key, value in message.items() if key != PROVIDER_FIELDS})


def copy_of(message: Message) -> Message:
    """Return a copy that shares nothing that can be changed; texts cannot, so they are not copied."""
    copied = {key: value if isinstance(value, str) else deepcopy(value) for key, value in message.items()}
    return cast("Message", copied)


def orphans_as_user(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with tool results that answer no call of theirs as messages of the user.

    Such a result tells the model what was wrong with a call that could not be read. The call stands in the
    content of its message and not in `tool_calls`, and some chat templates refuse results without a call.
    """
    calls: set[str] = set()
    shown: list[Message] = []
    for message in messages:
        calls.update(call["id"] for call in message.get("tool_calls") or ())
        orphan = message["role"] == "tool" and message.get("tool_call_id", "") not in calls
        shown.append({"role": "user", "content": message.get("content")} if orphan else message)
    return shown


def text_of(message: Message) -> str:
    """Return the text of a message. Parts that are not text, such as images, are left out."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if part.get("type") == "text")


def without_hints(message: Message) -> Message:
    """Return a message without the parts that are marked as hints; texts that remain become one text."""
    content = message.get("content")
    if not isinstance(content, list) or not any(part.get("hint") for part in content):
        return message
    kept = [part for part in content if not part.get("hint")]
    if all(part.get("type") == "text" for part in kept):
        return {**message, "content": "".join(part.get("text", "") for part in kept)}
    return {**message, "content": kept}


def images_in(content: object) -> int:
    """Return how many images content has."""
    if not isinstance(content, list):
        return 0
    return sum(part.get("type") == "image_url" for part in cast("list[ContentPart]", content))


def image_parts(messages: Sequence[Message]) -> list[ContentPart]:
    """Return the parts of messages that are images."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part for part in parts if part.get("type") == "image_url"]


class CallStatus(StrEnum):
    """What the parser found out about one tool call."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    """The call's text does not follow the model's format for tool calls."""
    UNCLOSED = "unclosed"
    """The call is not closed, so it is never executed."""
    MISSING_NAME = "missing_name"
    """The call does not name a tool."""
    UNKNOWN_TOOL = "unknown_tool"
    """The call names a tool that the episode does not have."""
    BAD_ARGUMENTS = "bad_arguments"
    """The arguments are not a JSON object, or cannot be read."""
    IN_THINKING = "in_thinking"
    """The call is inside the model's thinking; it is neither executed nor answered."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call as the model wrote it."""

    id: str
    name: str
    arguments: str
    """The arguments as JSON text; exactly the sampled text where the model's format for calls is JSON."""
    status: CallStatus = CallStatus.OK
    error: str = ""
    """Text for the model that says what is wrong with the call; empty if `status` is ok."""
    values: Mapping[str, object] | None = field(default=None, compare=False, repr=False)
    """The arguments as Python values; None if nobody has parsed them yet or they are no usable object.
    Do not change them. They follow from `arguments`, so they are neither compared nor written to disk."""
    text: str = ""
    """The call as the model wrote it, if it could not be read; the message's content then contains it."""

    def to_message(self) -> ToolCallMessage:
        """Return the call in the shape of an assistant message's `tool_calls` entry."""
        return chat_call(self.id, self.name, self.arguments)

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
    """The tool raised `ToolError`, whose text the model reads."""
    EXCEPTION = "exception"
    """The tool raised another exception, which is recorded with its traceback."""
    TIMEOUT = "timeout"
    NOT_RUN = "not_run"
    """A limit was reached before the call could run."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to one tool call."""

    tool_call_id: str
    name: str
    content: str | list[ContentPart]
    """What the model reads: text unchanged, images as content parts, and any other value as JSON."""
    error_kind: ToolErrorKind | None = None
    detail: str = ""
    """A traceback or the full reason. It is recorded and never shown to the model."""
    duration_s: float = 0.0
    trimmed: bool = False
    """True if the content was shortened to fit a limit."""
    full_chars: int | None = None
    """Number of characters of the content before it was trimmed."""
    repaired: bool = False
    """True if the call's JSON was broken and was repaired (`repair_json`)."""
    max_tokens: int | None = None
    """The tool's own limit on its output. If the run has a limit too, the stricter one holds."""
    full_output: str = ""
    """Path of the file with the uncut content; empty if the run keeps no such files."""

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


MAX_ARGUMENT_CHARS = 1_000_000
"""Longer arguments are refused without parsing: no model samples them, and parsing them would block the
event loop."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89abcdefABCDEF]")
_SHOWN_CHARS = 40


class ArgumentError(ValueError):
    """The arguments cannot be used; `text` is one line for the model."""

    def __init__(self, kind: ToolErrorKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


def decode(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        ArgumentError: The text is not JSON, or contains a value that tools do not accept.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 10, 0) : error.pos + 10]
        raise ArgumentError(
            ToolErrorKind.INVALID_JSON,
            f"the arguments are not valid JSON: {error.msg} at character {error.pos}, near {near!r}",
        ) from None
    except RecursionError:
        raise ArgumentError(ToolErrorKind.BAD_ARGUMENTS, "the arguments are nested too deeply") from None
    except ArgumentError:
        raise
    except ValueError:  # an integer with more digits than Python reads
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS, "the arguments contain a number with too many digits"
        ) from None
    check_text(text, value)
    return value


def decode_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a position of a longer text, and the position after it.

    Raises:
        ValueError: No JSON value begins there, or tools do not accept it.
        RecursionError: The value is nested too deeply.
    """
    value, end = _DECODER.raw_decode(text, start)
    check_text(text[start:end], value)
    return value, end


def check_text(text: str, value: object) -> None:
    """Check that JSON text and the value parsed from it are valid Unicode.

    Raises:
        ArgumentError: They contain a lone surrogate, which is one half of a surrogate pair.
    """
    try:
        text.encode()
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(error.object[error.start]):04X}"
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS,
            f"the arguments contain an invalid Unicode surrogate ({code}); remove it",
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS, f"the key {_short(twice)} appears twice; write it once"
        )
    return values


def _finite(digits: str) -> float:
    value = float(digits)
    return value if isfinite(value) else _not_json(digits)


def _not_json(constant: str) -> float:
    raise ArgumentError(
        ToolErrorKind.BAD_ARGUMENTS, f"the arguments contain {_short(constant)}, which is not a JSON number"
    )


def _short(text: str) -> str:
    shown = json.dumps(text, ensure_ascii=True)
    return shown if len(shown) <= _SHOWN_CHARS else shown[: _SHOWN_CHARS - 3] + "..."


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_not_json)
