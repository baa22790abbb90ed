"""Anthropic's messages."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentenv.core.messages import JsonValue, Message
from agentenv.endpoint.request import Answer, Asked, NotAnswered, Progress
from agentenv.endpoint.wire.base import (
    Event,
    Head,
    Held,
    Json,
    Kind,
    Stream,
    chunks,
    content_of,
    schema_of,
    tokens_of,
    with_system,
)
from agentenv.endpoint.wire.chat import chat_call
from agentenv.endpoint.wire.client_tools import client_tool
from agentenv.endpoint.wire.fields import MESSAGES, ignored_in
from agentenv.endpoint.wire.forms import choice_of, form_of, schema_in

__all__ = ["Messages"]

_KINDS = {404: "not_found_error", 500: "api_error", 503: "overloaded_error"}


class Messages:
    """Anthropic's messages, at `/v1/messages`."""

    id_prefix = "msg_"
    holds = True

    def read(self, body: Json, held: Held) -> Asked:
        """Return the request in a body; see `agentenv.endpoint.wire.base.Wire`."""
        before, held_tools = _before(body.get("thread"), held)
        before = with_system(before, _text(body.get("system")))
        choice = body.get("tool_choice") or {"type": "auto"}
        many = not choice.get("disable_parallel_tool_use")
        tools, other = _tools(body.get("tools") or ())
        tools = tools or list(held_tools)
        output = body.get("output_config") or {}
        more = tuple(name for name in output if name != "format")
        schema = schema_in(output.get("format") or body.get("output_format"))
        return Asked(
            messages=[*before, *held.last.read(body["messages"], _all)],
            tools=tools,
            tool_choice=choice_of(choice),
            form=form_of(choice, tools, schema, many=many),
            parallel_calls=many,
            model=str(body.get("model") or ""),
            max_tokens=tokens_of(body, "max_tokens"),
            stop=tuple(map(str, body.get("stop_sequences") or ())),
            stream=bool(body.get("stream")),
            call_prefix="toolu_",
            ignored=(*more, *other, *ignored_in(body, MESSAGES)),
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


class _MessageStream:
    """An answer that is streamed block by block; see `agentenv.endpoint.wire.base.Stream`."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._blocks = 0
        """Number of blocks that were begun."""
        self._kind: Kind | None = None
        """What the open block is; None if none is open."""

    def begin(self, progress: Progress) -> Iterator[Event]:
        none = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(progress, 0)}
        yield _event("message_start", message={**_frame(self._head), **none})

    def part(self, kind: Kind, text: str) -> Iterator[Event]:
        if self._kind != kind:
            yield from self._close()
            yield from self._open(kind)
        if kind == "thinking":
            yield self._delta({"type": "thinking_delta", "thinking": text})
        else:
            yield self._delta({"type": "text_delta", "text": text})

    def end(self, answer: Answer) -> Iterator[Event]:
        if not answer.text and not answer.calls:
            yield from self._close()
            yield from self._open("text")
        yield from self._close()
        for id, name, arguments in answer.calls:
            yield self._start({"type": "tool_use", "id": id, "name": name, "input": {}})
            for part in chunks(arguments):
                yield self._delta({"type": "input_json_delta", "partial_json": part})
            yield _event("content_block_stop", index=self._blocks - 1)
        ended = {"stop_reason": _reason(answer), "stop_sequence": answer.stop}
        yield _event("message_delta", delta=ended, usage=_usage(answer, answer.completion_tokens))
        yield _event("message_stop")

    def failed(self, error: NotAnswered) -> Iterator[Event]:
        yield "error", _error(error)

    def _open(self, kind: Kind) -> Iterator[Event]:
        self._kind = kind
        empty: Json = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
        yield self._start({"type": kind, **empty})

    def _close(self) -> Iterator[Event]:
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _signature(self._head)})
        if self._kind is not None:
            yield _event("content_block_stop", index=self._blocks - 1)
        self._kind = None

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
    if error.code == "context_length_exceeded":
        told = f"prompt is too long: {told}"
    kind = _KINDS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": told, "code": error.code}}


def _event(name: str, **data: object) -> Event:
    return name, {"type": name, **data}


def _before(thread: Json | None, held: Held) -> tuple[list[Message], Sequence[Mapping[str, JsonValue]]]:
    """Return the conversation that a request goes on from, with its tools."""
    if not thread or thread.get("type") != "continue":
        return [], ()
    id = str(thread["previous_message_id"])
    if (known := held.get(id)) is None:
        raise NotAnswered(400, "thread_unsupported_request", f"there is no message {id!r}")
    return list(known[0]), known[1]


def _text(system: str | Sequence[Json] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "\n".join(part["text"] for part in system)


def _all(raw: list[Any]) -> list[Message]:
    return [message for said in raw for message in _messages(said)]


def _messages(said: Json) -> Iterator[Message]:
    """Yield a message in OpenAI's form; one with results of tools becomes several."""
    content = said["content"]
    blocks: list[Json] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if said["role"] == "assistant":
        yield _assistant(blocks)
        return
    rest: list[Json] = []
    for block in blocks:
        if block["type"] == "tool_result":
            result = content_of(block.get("content"))
            yield {"role": "tool", "tool_call_id": str(block["tool_use_id"]), "content": result}
        else:
            rest.append(block)
    if rest:
        yield {"role": str(said["role"]), "content": _joined(rest)}


def _joined(blocks: Sequence[Json]) -> Any:
    """Return the content of blocks; texts are paragraphs of one text."""
    if all(block["type"] == "text" for block in blocks):
        return "\n".join(block["text"] for block in blocks)
    return content_of(blocks)


def _assistant(blocks: Sequence[Json]) -> Message:
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
        if "input_schema" in tool:
            functions.append(schema_of(tool["name"], tool.get("description"), tool["input_schema"]))
        elif (known := client_tool(str(tool.get("type")))) is not None:
            functions.append(schema_of(tool["name"], known.description, known.parameters))
        else:
            other.append(f"tool_{tool.get('type')}")
    return functions, other


def _blocks(head: Head, answer: Answer) -> list[Json]:
    blocks: list[Json] = []
    if answer.thinking:
        blocks.append({"type": "thinking", "thinking": answer.thinking, "signature": _signature(head)})
    if answer.text or not answer.calls:
        blocks.append({"type": "text", "text": answer.text})
    for id, name, arguments in answer.calls:
        blocks.append({"type": "tool_use", "id": id, "name": name, "input": _input(arguments)})
    return blocks


def _input(arguments: str) -> Json:
    """Return arguments as an object, which is what they are in a call that could be read."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _reason(answer: Answer) -> str:
    if answer.finish_reason == "length":
        return "max_tokens"
    if answer.calls:
        return "tool_use"
    return "end_turn" if answer.stop is None else "stop_sequence"


def _usage(asked: Answer | Progress, completion_tokens: int) -> Json:
    return {
        "input_tokens": asked.prompt_tokens - asked.cached_tokens,
        "output_tokens": completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": asked.cached_tokens,
    }
