"""The canonical form of messages, in which what a client sends back equals what it was sent.

Clients change what they were sent: they strip white space, write arguments anew, and drop thinking. Such a
change does not matter, because the recorded tokens are kept. Every other change makes another message:

1. A message of the assistant with calls is their ids, names and arguments, in any order of the calls.
   Arguments are compared as values, so `1.0` equals `1` and so are their keys. A message without calls is its
   text without white space at its ends.
2. Every other message is its role, its content and the id of the call that it answers.
3. Thinking, and text beside calls, are not a part of the form, because clients drop them. What comes back
   changed is found by `is_same`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

from agentenv.core.messages import JsonValue, Message, ToolCallMessage, chat_call, text_of

__all__ = [
    "begins",
    "canonical",
    "canonical_arguments",
    "digest",
    "echoes_of",
    "is_same",
    "next_digest",
    "renumbered",
    "said_beside",
]

_FLATTENED = re.compile(r"(?:^|\n)Calling tools:\n(?=\[)")
"""What smolagents writes between the text of a message and the Python text of its calls."""


# A new encoder for each call would take longer than the encoding of a short message.
_in_order = json.JSONEncoder(sort_keys=True, default=str).encode
_as_it_is = json.JSONEncoder(default=str).encode


def digest(*values: object) -> bytes:
    """Return a digest of JSON values, in which the order of keys does not matter."""
    return blake2b(_in_order(values).encode(), digest_size=16).digest()


def next_digest(before: bytes, message: Message) -> bytes:
    """Return the digest of a conversation that goes on with a message."""
    return blake2b(before + _as_it_is(canonical(message)).encode(), digest_size=16).digest()


def canonical(message: Message) -> list[object]:
    """Return the parts of a message that decide whether it equals another one."""
    content = message.get("content")
    if message["role"] != "assistant":
        # A list is compared as its text if it is nothing but text, because some clients split it anew.
        if isinstance(content, list) and all(part.get("type") == "text" for part in content):
            content = text_of(message)
        return [message["role"], content or "", message.get("tool_call_id") or ""]
    if calls := message.get("tool_calls"):
        return ["assistant", sorted(_canonical_call(call) for call in calls)]
    return ["assistant", text_of(message).strip()]


def _canonical_call(call: ToolCallMessage) -> list[str]:
    function = call["function"]
    return [call["id"], function["name"], canonical_arguments(function["arguments"])]


def canonical_arguments(arguments: str) -> str:
    """Return arguments as a text that depends on their values only; the text itself if it is not JSON."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return _in_order(_plain(value))


def _plain(value: Any) -> Any:
    """Return a JSON value with whole numbers as integers, because JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def is_same(sent: Message, returned: Message) -> bool:
    """Return whether what is beside the canonical form of a returned message is what was sent, or dropped.

    OpenAI's JavaScript SDK keeps only the last part of streamed thinking.
    """
    thinking, text = said_beside(sent)
    returned_thinking, returned_text = said_beside(returned)
    return returned_thinking in thinking and returned_text in ("", text)


def renumbered(sent: Message, returned: Message) -> dict[str, str]:
    """Return the ids that the calls of a returned message were sent with, by the ids that it has instead.

    Returns:
        No ids if more than the ids of the calls was changed.
    """

    def described(message: Message) -> list[list[str]]:
        calls = (_canonical_call(call) for call in message.get("tool_calls") or ())
        return sorted(([*said, id] for id, *said in calls), key=lambda call: call[:2])

    ours, theirs = described(sent), described(returned)
    if [call[:2] for call in ours] != [call[:2] for call in theirs] or not is_same(sent, returned):
        return {}
    return {other: own for (*_, other), (*_, own) in zip(theirs, ours, strict=True)}


def begins(sent: Message, returned: Message) -> bool:
    """Return whether a returned message is only the beginning of the text that was sent."""
    text, whole = text_of(returned).strip(), text_of(sent).strip()
    rest = len(text) < len(whole) or bool(sent.get("tool_calls"))
    return bool(text) and rest and whole.startswith(text) and not returned.get("tool_calls")


def said_beside(message: Message) -> tuple[str, str]:
    """Return what of a message is not in its canonical form: its thinking, and the text beside its calls."""
    thinking = (message.get("reasoning_content") or "").strip()
    return thinking, text_of(message).strip() if message.get("tool_calls") else ""


def echoes_of(message: Message) -> Iterator[Message]:
    """Yield what a message of the assistant may have been before a client wrote its calls into its text.

    smolagents sends calls back as text, after the line `Calling tools:` and as a Python list. Its CodeAgent
    writes a call there that the model never made, so the text alone is yielded too.
    """
    text = text_of(message)
    if message["role"] != "assistant" or not (found := _FLATTENED.search(text)):
        return
    said: Message = {"role": "assistant", "content": text[: found.start()]}
    if calls := _calls_in(text[found.end() :]):
        yield {**said, "tool_calls": calls}
    yield said


def _calls_in(text: str) -> list[ToolCallMessage]:
    """Return the calls that a Python list of them describes; none if it is not such a list."""
    try:
        listed = ast.literal_eval(text.strip())
        return [_call_of(call["id"], call["function"]) for call in cast("Sequence[Any]", listed)]
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError):
        return []


def _call_of(id: object, function: Mapping[str, JsonValue]) -> ToolCallMessage:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return chat_call(str(id), str(function["name"]), text)
