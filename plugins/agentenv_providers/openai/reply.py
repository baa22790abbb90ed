"""Makes a whole reply of whatever a chat API answers, and gives the API its own words back.

Everything else may trust the shape of a reply: content, thinking, ids, names and arguments are texts, ids are
distinct, and arguments that the model left out are `{}`. What cannot be read is an error in words.

What the API said in another form, or under keys that no other API knows (signatures, encrypted reasoning), is
kept under `PROVIDER_FIELDS` of the message. It goes back to the same API as it came (`sent_back`), and stands
nowhere else: the text of a message is `text_of` for everybody.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from agentenv.core import (
    PROVIDER_FIELDS,
    Message,
    ToolCallMessage,
    distinct_calls,
    logger,
    text_of,
)
from agentenv.engine import FinishReason
from agentenv.render import TextProtocol

__all__ = ["LEFT_CALL", "ChatReply", "Unreadable", "sent_back", "whole_reply"]

CUT = re.compile("length|max_(output_)?tokens|model_length|model_context_window_exceeded")
"""Finish reasons of answers that a limit cut off."""
FILTERED = re.compile(
    "content_filter(ed)?|refusal|(image_)?safety|recitation|blocklist|prohibited_content|spii|sensitive"
    "|guardrail_intervened|error_toxic"
)
"""Finish reasons of answers that a filter withheld: of OpenAI, Anthropic, Gemini, GLM, Bedrock and Cohere."""
MALFORMED = re.compile("malformed_(function|tool)_(call|use)|unexpected_tool_call")
"""Finish reasons of answers with a call that the model wrote and the API could not read."""
BROKEN = re.compile("(network_)?error(_.*)?|abort(ed)?|cancel(l?ed)?|timeout|insufficient_system_resource")
"""Finish reasons of answers that the API broke off: of OpenRouter, GLM, Cohere, vLLM, SGLang and DeepSeek."""
LEFT_CALL = re.compile(
    r"<[|\uff5c]?(\w+:)?tool[_▁]calls?([_▁](section[_▁])?(begin|start))?[|\uff5c]?>|<function(_calls>|=\w)"
    r"|<\uff5cDSML\uff5c|\[TOOL_CALLS\]|<\|python_(tag|start)\|>"
)
"""What begins a call that a server without the model's parser leaves in the text."""
ENDED = re.compile("|stop|tool_calls|function_call|eos(_token)?|end(_turn)?|stop_sequence|tool_use|complete")
"""Finish reasons of answers that no limit cut off."""
THOUGHT = re.compile(
    r"\s*(?:<(think|thinking|thought|reasoning)>|\[(THINK)\])(.*?)(?:</\1>|\[/\2\]|\Z)\s*", re.DOTALL
)
"""Thinking that a server without a parser for it leaves at the beginning of the text."""
CLOSED = re.compile(r"((?:(?!<think>).)*?)</think>\s*", re.DOTALL)
"""The same where the opening tag stands in the prompt, as with templates of DeepSeek-R1 and QwQ."""
THINKING_PARTS = {"thinking", "reasoning", "reasoning_content"}
MAX_CALLS = 1_000
"""Most calls of one reply; a model that makes more repeats itself, and is told that it cannot be read."""
KNOWN = {"role", "tool_calls", "function_call"}
"""Keys of a message that are not kept as they came."""
READ = {"content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call"}
"""Keys of an API's message from which ours is made."""

_log = logger(__name__)


class Unreadable(ValueError):
    """An API answered with something that is no chat completion; the text says what it is."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A whole reply."""

    message: Message
    finish_reason: FinishReason
    malformed: bool = False
    """Whether the model wrote a call that the API could not read, and therefore left out or in the text."""


def whole_reply(choice: object, api: str, *, tools: bool = False, text_tools: bool = False) -> ChatReply:
    """Return the reply that a choice of an API's answer holds.

    Args:
        choice: the choice, which may be any JSON value.
        api: name of the engine, to which the API's own fields go back.
        tools: whether the model was given tools, so that a call in its text is no answer.
        text_tools: read calls from the text if there are no others.

    Raises:
        Unreadable: It is no reply.
        EOFError: The API broke off the answer.
    """
    held = _mapping(choice, "the choice")
    said = _mapping(held.get("message"), "the message")
    reason = held.get("finish_reason") or ""
    lower = reason.lower() if isinstance(reason, str) else str(reason)
    message = _message(said, api, text_tools=text_tools)
    if CUT.fullmatch(lower):
        return ChatReply(message, "length")
    if FILTERED.fullmatch(lower):
        return ChatReply(message, "content_filter")
    if BROKEN.fullmatch(lower):
        raise EOFError(f"broke off its answer with the finish reason {reason!r}")
    unread = tools and LEFT_CALL.search(text_of(message)) is not None
    too_many = len(_raw_calls(said)) > MAX_CALLS
    malformed = unread or too_many or MALFORMED.fullmatch(lower) is not None
    if not malformed and not ENDED.fullmatch(lower):
        _log.warning("%s ended an answer with the unknown finish reason %r, read as 'stop'", api, reason)
    return ChatReply(message, "stop", malformed and not message.get("tool_calls"))


def _message(said: Mapping[str, Any], api: str, *, text_tools: bool) -> Message:
    text, thought = _content(said)
    message: Message = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    raw = _raw_calls(said)
    if len(raw) > MAX_CALLS:
        raw, said = [], {**said, "tool_calls": None}
    calls = [_call(call) for call in raw]
    if text_tools and not calls:
        message["content"], calls = TextProtocol.calls_in(text)
    if calls:
        message["tool_calls"] = distinct_calls(calls)
    fields = _own_fields(said, message, raw)
    if fields:
        message[PROVIDER_FIELDS] = {"api": api, "fields": fields}
    return message


def _own_fields(
    said: Mapping[str, Any], message: Message, raw: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the fields in which an API's message differs from ours; None stands for one that it lacks."""
    ours = cast("Mapping[str, Any]", message)
    fields: dict[str, Any] = {
        key: value
        for key, value in said.items()
        if key not in KNOWN and value not in (None, "", [], {}) and ours.get(key) != value
    }
    if said.get("content") is None:
        fields["content"] = None
    if "reasoning_content" in message and said.get("reasoning_content") in (None, ""):
        fields["reasoning_content"] = None
    if said.get("tool_calls") and "tool_calls" in message:
        returned = [_returned(call, own) for call, own in zip(raw, message["tool_calls"], strict=True)]
        if returned != message["tool_calls"]:
            fields["tool_calls"] = returned
    return fields


def _returned(raw: Mapping[str, Any], own: ToolCallMessage) -> dict[str, Any]:
    """Return an API's call as it goes back: with our id, and with arguments that are JSON."""
    function = raw.get("function")
    if not isinstance(function, Mapping):
        return {**own}
    said = cast("Mapping[str, Any]", function)
    arguments = said.get("arguments")
    if not (isinstance(arguments, Mapping) and arguments):
        arguments = own["function"]["arguments"]
    inner = {**own["function"], **said, "name": own["function"]["name"], "arguments": arguments}
    return {**own, **raw, "id": own["id"], "function": inner}


def sent_back(message: Message, api: str) -> Message:
    """Return a message as an API is sent it: with the fields that the same API gave it, and no others.

    A message that was changed since, such as a shortened one, goes back without them.
    """
    if PROVIDER_FIELDS not in message:
        return message
    plain = cast("Message", {key: value for key, value in message.items() if key != PROVIDER_FIELDS})
    kept = message[PROVIDER_FIELDS]
    if kept.get("api") != api:
        return plain
    fields = cast("Mapping[str, Any]", kept["fields"])
    back: dict[str, Any] = {**plain, **fields}
    back = {key: value for key, value in back.items() if value is not None or key == "content"}
    # Most differ only in that their content is null beside a call, and each is sent in every turn.
    if not any(value and key in READ for key, value in fields.items()):
        return plain if "content" in fields and plain.get("content") else cast("Message", back)
    calls = plain.get("tool_calls") or []
    if "tool_calls" in back and len(back["tool_calls"]) == len(calls):
        pairs = zip(back["tool_calls"], calls, strict=True)
        back["tool_calls"] = [{**own, "id": call["id"]} for own, call in pairs]
    read = _message(back, api, text_tools=False)
    read.pop(PROVIDER_FIELDS, None)
    return cast("Message", back) if read == plain else plain


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Unreadable(f"{what} is {_shown(value)}")
    return cast("Mapping[str, Any]", value)


def _shown(value: object) -> str:
    return f"{json.dumps(value, default=repr):.80}"


# Text and thinking ------------------------------------------------------------------------


def _content(said: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text of an API's message, and its thinking, wherever they stand."""
    texts: list[str] = []
    thoughts: list[str] = []
    for name in ("reasoning_content", "reasoning"):
        if not thoughts and isinstance(thought := said.get(name), str) and thought:
            thoughts.append(thought)
    for part in _parts(said.get("content")):
        kind = part.get("type")
        if kind in THINKING_PARTS:
            thoughts.append(_text(part, str(kind)))
        elif kind == "refusal" or isinstance(part.get("text"), str):
            texts.append(_text(part, "refusal"))
    text = "".join(texts)
    if isinstance(refusal := said.get("refusal"), str) and not text:
        text = refusal
    start = 0
    while found := THOUGHT.match(text, start) or CLOSED.match(text, start):
        thoughts.append(found[found.lastindex or 1].strip())
        start = found.end()
    return text[start:], "".join(dict.fromkeys(thoughts))


def _parts(content: object) -> list[Mapping[str, Any]]:
    """Return content as parts."""
    if content is None:
        return []
    if isinstance(content, Mapping):
        content = [content]
    listed = [content] if isinstance(content, str) else content
    if not isinstance(listed, list):
        raise Unreadable(f"the content is {_shown(content)}")
    parts: list[Mapping[str, Any]] = []
    for part in cast("list[Any]", listed):
        if not isinstance(part, str | Mapping):
            raise Unreadable(f"a part of the content is {_shown(part)}")
        parts.append({"type": "text", "text": part} if isinstance(part, str) else part)
    return parts


def _text(part: Mapping[str, Any], key: str) -> str:
    """Return the text of a part, which stands under `key` or under "text" and may consist of parts."""
    said = part.get(key) or part.get("text") or ""
    if isinstance(said, list):
        inner = [each for each in cast("list[Any]", said) if isinstance(each, Mapping)]
        return "".join(_text(cast("Mapping[str, Any]", each), "text") for each in inner)
    return said if isinstance(said, str) else ""


# Calls ------------------------------------------------------------------------------------


def _raw_calls(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = said.get("tool_calls") or []
    if not calls and (function := said.get("function_call")):
        # The form of a single call before there were lists of calls; some servers still use it.
        calls = [{"function": function}]
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, list):
        raise Unreadable(f"the tool calls are {_shown(calls)}")
    return [_mapping(call, "a tool call") for call in cast("list[Any]", calls)]


def _call(call: Mapping[str, Any]) -> ToolCallMessage:
    """Return a tool call of the API as a message entry; a call without id gets one."""
    function = _mapping(call.get("function", call), "the function of a tool call")
    name, id = function.get("name"), call.get("id")
    written = id if isinstance(id, str | int) and id else f"call_{uuid4().hex[:24]}"
    return {
        "id": str(written),
        "type": "function",
        "function": {
            "name": name if isinstance(name, str) else "",
            "arguments": _arguments(function.get("arguments")),
        },
    }


def _arguments(said: object) -> str:
    """Return the arguments of a call as JSON text; what only an API can have done to them is undone.

    Servers put an object into a text, escape it, repeat it, or append an empty text. What remains is what the
    model wrote.
    """
    if said is None or said == "":
        return "{}"
    if not isinstance(said, str):
        return json.dumps(said)
    try:
        value = json.loads(said)
        return value if isinstance(value, str) and isinstance(json.loads(value), dict) else said
    except (ValueError, RecursionError):
        return _undone(said)


def _undone(said: str) -> str:
    text = said.strip()
    try:
        first, end = json.JSONDecoder().raw_decode(text)
        rest = text[end:].strip()
        if isinstance(first, dict) and (rest == '""' or not rest.replace(text[:end], "").strip()):
            return text[:end]
    except (ValueError, RecursionError):
        pass
    try:
        inner = json.loads(f'"{text}"')
        return inner if isinstance(json.loads(inner), dict) else said
    except (ValueError, RecursionError):
        return said
