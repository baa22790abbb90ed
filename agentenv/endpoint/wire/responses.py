"""OpenAI's responses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from agentenv.core.messages import JsonValue, Message, chat_call
from agentenv.endpoint.request import Answer, Asked, Kind, NotAnswered, Progress
from agentenv.endpoint.wire.chat import openai_error
from agentenv.endpoint.wire.common import (
    LIST,
    OBJECT,
    Blocks,
    Conversations,
    Event,
    Head,
    Json,
    Stream,
    arguments_of,
    chunks,
    content_of,
    given,
    new_id,
    role_of,
    schema_of,
    tokens_of,
    with_system,
    words,
)
from agentenv.endpoint.wire.fields import RESPONSES, ignored_in, ignored_in_messages, ignored_in_tools
from agentenv.endpoint.wire.forms import choice_of, form_of, schema_in

__all__ = ["Responses"]

_HEADS: Mapping[Kind, str] = {"text": "response.output_text", "thinking": "response.reasoning_text"}

INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why a response is incomplete, by the finish reason."""


class Responses:
    """OpenAI's responses, at `/v1/responses`."""

    id_prefix = "resp_"
    holds = True

    def read(self, body: Json, held: Conversations) -> Asked:
        """Return the request in a body; see `agentenv.endpoint.wire.common.Wire`."""
        ignored = list(ignored_in(body, RESPONSES))
        before = _before(body.get("previous_response_id"), held)
        before = with_system(before, given(body, "instructions", str))
        items = body["input"]
        items = [{"role": "user", "content": items}] if isinstance(items, str) else given(body, "input", LIST)
        choice, sent = body.get("tool_choice"), given(body, "tools", LIST)
        tools, other = _tools(sent)
        many = body.get("parallel_tool_calls") is None or given(body, "parallel_tool_calls", bool)
        text = given(body, "text", OBJECT)
        more = ("verbosity",) if text.get("verbosity") else ()

        def convert(raw: list[Any]) -> list[Message]:
            named = [_issued(item, held) for item in raw]
            ignored.extend(ignored_in_messages(named))
            return _messages(named)

        return Asked(
            messages=[*before, *held.last.read(items, convert)],
            tools=tools,
            tool_choice=choice_of(choice),
            form=form_of(choice, tools, schema_in(text.get("format")), many=many),
            parallel_calls=many,
            model=str(body.get("model") or ""),
            max_tokens=tokens_of(body, "max_output_tokens"),
            stream=given(body, "stream", bool),
            ignored=(*more, *other, *ignored, *ignored_in_tools(sent)),
        )

    def whole(self, head: Head, answer: Answer) -> Json:
        """Return an answer as one object."""
        # The text may have been cut at the limit; the thinking before it was whole.
        ends = {"text": _status(answer), "thinking": "completed"}
        head.items.extend(_item(kind, text, ends[kind]) for kind, text in answer.parts)
        head.items.extend(map(_call, answer.calls))
        return _response(head, head.items, answer)

    def stream(self, head: Head) -> Stream:
        """Return what makes the events of a streamed answer."""
        return _ResponseStream(head)

    def error(self, error: NotAnswered) -> Json:
        """Return an error in the form that the SDKs understand."""
        return openai_error(error)


class _ResponseStream(Blocks):
    """An answer that is streamed item by item."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._number = 0
        """Number of the next event."""
        self._items = head.items
        """The items that are whole."""
        self._item: Json = {}
        """The open item without its content."""
        self._parts: list[str] = []
        """Text of the open item."""

    def begin(self, progress: Progress) -> Iterator[Event]:
        response = _response(self._head, [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def _add(self, kind: Kind, text: str) -> Event:
        self._parts.append(text)
        return self._event(f"{_HEADS[kind]}.delta", **self._place(), delta=text, **_more(kind))

    def _done(self, answer: Answer) -> Iterator[Event]:
        done = _response(self._head, self._items, answer)
        yield self._event(f"response.{done['status']}", response=done)

    def failed(self, error: NotAnswered) -> Iterator[Event]:
        told = openai_error(error)
        yield self._event("error", code=error.code, message=error.message, param=None, **told)

    def _open(self, kind: Kind) -> Iterator[Event]:
        self._item, self._parts = _item(kind, "", "in_progress"), []
        # The content is added by an event of its own; the SDKs would have it twice if it stood here, too.
        added = {**self._item, "content": []}
        yield self._event("response.output_item.added", output_index=len(self._items), item=added)
        part = self._item["content"][0]
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _close(self, kind: Kind, answer: Answer | None) -> Iterator[Event]:
        text, place = "".join(self._parts), self._place()
        status = "completed" if answer is None else _status(answer)
        item = {**_item(kind, text, status), "id": self._item["id"]}
        yield self._event(f"{_HEADS[kind]}.done", **place, text=text, **_more(kind))
        yield self._event("response.content_part.done", **place, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)

    def _call(self, call: tuple[str, str, str]) -> Iterator[Event]:
        item = _call(call)
        index, arguments = len(self._items), item["arguments"]
        at = {"item_id": item["id"], "output_index": index}
        head = "response.function_call_arguments"
        yield self._event("response.output_item.added", output_index=index, item={**item, "arguments": ""})
        for part in chunks(arguments):
            yield self._event(f"{head}.delta", **at, delta=part)
        yield self._event(f"{head}.done", **at, arguments=arguments, name=item["name"])
        yield self._event("response.output_item.done", output_index=index, item=item)
        self._items.append(item)

    def _place(self) -> Json:
        return {"item_id": self._item["id"], "output_index": len(self._items), "content_index": 0}

    def _event(self, kind: str, **data: Any) -> Event:
        self._number += 1
        return kind, {"type": kind, **data, "sequence_number": self._number - 1}


def _before(id: object, held: Conversations) -> list[Message]:
    """Return the conversation that a request goes on from."""
    if id is None:
        return []
    # Held by this session alone, so that no client goes on from the conversation of another.
    if (known := held.get(str(id))) is None:
        raise NotAnswered(400, "previous_response_not_found", f"there is no response {id!r}")
    return list(known[0])


def _issued(item: Json, held: Conversations) -> Json:
    """Return an item, or the one that a client names in place of sending it.

    Raises:
        NotAnswered: No item of this session has the id.
    """
    if item.get("type") != "item_reference" and item.keys() != {"id"}:
        return item
    if (known := held.issued.get(str(item["id"]))) is None:
        raise NotAnswered(400, "unknown_item", f"there is no item with the id {item['id']!r}")
    return known


def _messages(items: Sequence[Json]) -> list[Message]:
    """Return items as messages; what the model says between two messages of others is one message."""
    messages: list[Message] = []
    for item in items:
        kind = item.get("type", "message")
        own = kind in {"reasoning", "function_call"} or item.get("role") == "assistant"
        if own:
            # Templates take one message of the assistant in a row, and the API has an item for each part.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            _extend(messages[-1], kind, item)
        elif kind == "function_call_output":
            output = content_of(item["output"])
            messages.append({"role": "tool", "tool_call_id": str(item["call_id"]), "content": output})
        elif kind == "message":
            role = role_of(item, "system", "developer", "user", "assistant")
            messages.append({"role": role, "content": content_of(item["content"])})
        else:
            raise NotAnswered(400, "unsupported_item", f"items of the type {kind!r} are not served")
    return messages


def _extend(message: Message, kind: str, item: Json) -> None:
    """Add an item of the model to its message."""
    if kind == "reasoning":
        # A client may send back the summary alone, which is all that OpenAI's own models show.
        message["reasoning_content"] = words(item.get("content")) or words(item.get("summary"))
    elif kind == "function_call":
        call = chat_call(str(item["call_id"]), str(item["name"]), arguments_of(item))
        message.setdefault("tool_calls", []).append(call)
    else:
        message["content"] = f"{message.get('content') or ''}{words(item['content'])}"


def _tools(tools: Sequence[Json]) -> tuple[list[Mapping[str, JsonValue]], list[str]]:
    """Return the functions among the tools, and the types of the others, which no model here can call."""
    functions: list[Mapping[str, JsonValue]] = []
    other: list[str] = []
    for tool in tools:
        if tool["type"] == "function":
            functions.append(schema_of(tool["name"], tool.get("description"), tool.get("parameters")))
        elif tool["type"] == "namespace":
            # A namespace only groups tools; the calls name the tools without it.
            inner = _tools(cast("Sequence[Json]", tool["tools"]))
            functions += inner[0]
            other += inner[1]
        else:
            other.append(f"tool_{tool['type']}")
    return functions, other


def _item(kind: Kind, text: str, status: str = "completed") -> Json:
    """Return the output item of the thinking or of the text."""
    if kind == "thinking":
        thought = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": thought}
    part: Json = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    message = {"type": "message", "id": new_id("msg_"), "role": "assistant", "status": status}
    return {**message, "content": [part]}


def _call(call: tuple[str, str, str]) -> Json:
    """Return the output item of a call."""
    call_id, name, arguments = call
    item = {"type": "function_call", "id": new_id("fc_"), "call_id": call_id, "name": name}
    return {**item, "arguments": arguments, "status": "completed"}


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason in INCOMPLETE else "completed"


def _more(kind: Kind) -> Json:
    """Return what events of the text have and those of the thinking have not."""
    return {"logprobs": []} if kind == "text" else {}


def _response(head: Head, items: list[Json], answer: Answer | None = None) -> Json:
    """Return a response; one without an answer is in progress."""
    # All fields that the API's schema requires, also those that mean nothing here.
    body = head.body
    cut = INCOMPLETE.get(answer.finish_reason) if answer is not None else None
    return {
        "id": head.id,
        "object": "response",
        "created_at": int(time.time()),
        "model": head.asked.model,
        "status": "in_progress" if answer is None else _status(answer),
        "incomplete_details": {"reason": cut} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": head.asked.parallel_calls,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [],
        "temperature": 1.0,
        "top_p": 1.0,
        "output": items,
        "usage": None if answer is None else _usage(answer),
    }


def _usage(answer: Answer) -> Json:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
