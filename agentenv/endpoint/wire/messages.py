"""Anthropic's messages."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentenv.core.messages import JsonValue, Message, chat_call
from agentenv.endpoint.request import Answer, Asked, Kind, NotAnswered, Progress
from agentenv.endpoint.wire.client_tools import client_tool
from agentenv.endpoint.wire.common import (
    LIST,
    OBJECT,
    Blocks,
    Conversations,
    Event,
    Head,
    Json,
    Stream,
    chunks,
    content_of,
    given,
    role_of,
    schema_of,
    texts_of,
    tokens_of,
    with_system,
)
from agentenv.endpoint.wire.fields import MESSAGES, ignored_in, ignored_in_messages, ignored_in_tools
from agentenv.endpoint.wire.forms import choice_of, form_of, schema_in

__all__ = ["Messages"]

_SAID = ("text", "thinking", "redacted_thinking", "tool_use")
"""Types of blocks that a message of the assistant may have; encrypted thinking is counted and not shown."""
_KINDS = {404: "not_found_error", 500: "api_error", 503: "overloaded_error"}


class Messages:
    """Anthropic's messages, at `/v1/messages`."""

    id_prefix = "msg_"
    holds = True

    def read(self, body: Json, held: Conversations) -> Asked:
        """Return the request in a body; see `agentenv.endpoint.wire.common.Wire`."""
        ignored = list(ignored_in(body, MESSAGES))
        before, held_tools = _before(given(body, "thread", OBJECT), held)
        before = with_system(before, _text(body.get("system")))
        choice = given(body, "tool_choice", OBJECT) or {"type": "auto"}
        many = not given(choice, "disable_parallel_tool_use", bool)
        sent = given(body, "tools", LIST)
        tools, other = _tools(sent)
        # A thread keeps its tools; a request that sends some replaces them, as its system text does.
        tools = tools or list(held_tools)
        output = given(body, "output_config", OBJECT)
        more = tuple(name for name in output if name != "format")
        schema = schema_in(output.get("format") or given(body, "output_format", OBJECT))

        def convert(raw: list[Any]) -> list[Message]:
            ignored.extend(ignored_in_messages(raw))
            return [message for said in raw for message in _messages(said)]

        return Asked(
            messages=[*before, *held.last.read(given(body, "messages", LIST), convert)],
            tools=tools,
            tool_choice=choice_of(choice),
            form=form_of(choice, tools, schema, many=many),
            parallel_calls=many,
            model=str(body.get("model") or ""),
            max_tokens=tokens_of(body, "max_tokens"),
            stop=texts_of(body, "stop_sequences"),
            stream=given(body, "stream", bool),
            call_prefix="toolu_",
            ignored=(*more, *other, *ignored, *ignored_in_tools(sent)),
        )

    def whole(self, head: Head, answer: Answer) -> Json:
        """Return an answer as one object."""
        return {
            **_frame(head),
            "content": _blocks(head, answer),
            "stop_reason": _reason(answer),
            "stop_sequence": answer.stop,
            "usage": _usage(answer, answer.completion_tokens),
        }

    def stream(self, head: Head) -> Stream:
        """Return what makes the events of a streamed answer."""
        return _MessageStream(head)

    def error(self, error: NotAnswered) -> Json:
        """Return an error in the form that the SDKs understand."""
        return _error(error)


class _MessageStream(Blocks):
    """An answer that is streamed block by block."""

    _blocks = 0
    """Number of blocks that were begun."""

    def begin(self, progress: Progress) -> Iterator[Event]:
        none = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(progress, 0)}
        yield _event("message_start", message={**_frame(self._head), **none})

    def failed(self, error: NotAnswered) -> Iterator[Event]:
        yield "error", _error(error)

    def _add(self, kind: Kind, text: str) -> Event:
        return self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: tuple[str, str, str]) -> Iterator[Event]:
        id, name, arguments = call
        # The arguments come as pieces of JSON, which the SDKs put together, so the first event has none.
        yield self._start({"type": "tool_use", "id": id, "name": name, "input": {}})
        for part in chunks(arguments):
            yield self._delta({"type": "input_json_delta", "partial_json": part})
        yield _event("content_block_stop", index=self._blocks - 1)

    def _done(self, answer: Answer) -> Iterator[Event]:
        ended = {"stop_reason": _reason(answer), "stop_sequence": answer.stop}
        yield _event("message_delta", delta=ended, usage=_usage(answer, answer.completion_tokens))
        yield _event("message_stop")

    def _open(self, kind: Kind) -> Iterator[Event]:
        empty: Json = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
        yield self._start({"type": kind, **empty})

    def _close(self, kind: Kind, answer: Answer | None) -> Iterator[Event]:
        if kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _signature(self._head)})
        yield _event("content_block_stop", index=self._blocks - 1)

    def _start(self, block: Json) -> Event:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: Json) -> Event:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)


def _frame(head: Head) -> Json:
    return {"id": head.id, "type": "message", "role": "assistant", "model": head.asked.model}


def _signature(head: Head) -> str:
    """Return what stands where Anthropic signs thinking; some clients know thinking by it."""
    return b64encode(f"agentenv/{head.id}".encode()).decode()


def _error(error: NotAnswered) -> Json:
    told = error.message
    # Anthropic's own words, by which clients know that the conversation must become shorter.
    if error.code == "context_length_exceeded":
        told = f"prompt is too long: {told}"
    kind = _KINDS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": told, "code": error.code}}


def _event(name: str, **data: object) -> Event:
    return name, {"type": name, **data}


def _before(thread: Json, held: Conversations) -> tuple[list[Message], Sequence[Mapping[str, JsonValue]]]:
    """Return the conversation that a request goes on from, with its tools."""
    if thread.get("type") != "continue":
        return [], ()
    id = str(thread["previous_message_id"])
    if (known := held.get(id)) is None:
        raise NotAnswered(400, "thread_unsupported_request", f"there is no message {id!r}")
    return list(known[0]), known[1]


def _text(system: object) -> str:
    content = content_of(system)
    if isinstance(content, str) and not isinstance(system, list):
        return content
    return "\n".join(part["text"] for part in given({"system": system}, "system", LIST))


def _messages(said: Json) -> Iterator[Message]:
    """Yield a message in OpenAI's form; one with results of tools becomes several."""
    content, role = said["content"], role_of(said, "user", "assistant", "system")
    text = [{"type": "text", "text": content}]
    blocks: list[Json] = text if isinstance(content, str) else given(said, "content", LIST)
    if role == "assistant":
        yield _assistant(blocks)
        return
    rest: list[Json] = []
    # Templates know results of tools as messages of their own, and before what the user says beside them.
    for block in blocks:
        if block["type"] == "tool_result":
            result = content_of(block.get("content"))
            yield {"role": "tool", "tool_call_id": str(block["tool_use_id"]), "content": result}
        else:
            rest.append(block)
    if rest:
        yield {"role": role, "content": _joined(rest)}


def _joined(blocks: Sequence[Json]) -> Any:
    """Return the content of blocks; texts are paragraphs of one text."""
    if all(block["type"] == "text" for block in blocks):
        return "\n".join(block["text"] for block in blocks)
    return content_of(blocks)


def _assistant(blocks: Sequence[Json]) -> Message:
    for block in blocks:
        if block["type"] not in _SAID:
            told = f"content of the type {block['type']!r} cannot be rendered"
            raise NotAnswered(400, "unsupported_content", told)

    def texts(kind: str, field: str) -> str:
        return "".join(block.get(field) or "" for block in blocks if block["type"] == kind)

    message: Message = {"role": "assistant", "content": texts("text", "text")}
    if thinking := texts("thinking", "thinking"):
        message["reasoning_content"] = thinking
    used = [block for block in blocks if block["type"] == "tool_use"]
    if used:
        message["tool_calls"] = [
            chat_call(str(block["id"]), str(block["name"]), json.dumps(block["input"], ensure_ascii=False))
            for block in used
        ]
    return message


def _tools(tools: Sequence[Json]) -> tuple[list[Mapping[str, JsonValue]], list[str]]:
    """Return the tools that the client runs, and the types of those that Anthropic's servers run."""
    functions: list[Mapping[str, JsonValue]] = []
    other: list[str] = []
    for tool in tools:
        # The client runs what it has described, and those tools of Anthropic whose schemas are known.
        if "input_schema" in tool:
            functions.append(schema_of(tool["name"], tool.get("description"), tool["input_schema"]))
        elif (known := client_tool(str(tool.get("type")))) is not None:
            functions.append(schema_of(tool["name"], known.description, known.parameters))
        else:
            other.append(f"tool_{tool.get('type')}")
    return functions, other


def _blocks(head: Head, answer: Answer) -> list[Json]:
    signed: dict[str, Json] = {"text": {}, "thinking": {"signature": _signature(head)}}
    blocks: list[Json] = [{"type": kind, kind: text, **signed[kind]} for kind, text in answer.parts]
    for id, name, arguments in answer.calls:
        blocks.append({"type": "tool_use", "id": id, "name": name, "input": _input(arguments)})
    return blocks


def _input(arguments: str) -> Json:
    """Return arguments as an object, which is what they are in a call that could be read."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _reason(answer: Answer) -> str:
    if answer.finish_reason == "length":
        return "max_tokens"
    if answer.finish_reason == "content_filter":
        return "refusal"
    if answer.calls:
        return "tool_use"
    return "end_turn" if answer.stop is None else "stop_sequence"


def _usage(asked: Answer | Progress, completion_tokens: int) -> Json:
    return {
        # Unlike OpenAI's count, this one leaves out what was read from the cache.
        "input_tokens": asked.prompt_tokens - asked.cached_tokens,
        "output_tokens": completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": asked.cached_tokens,
    }
