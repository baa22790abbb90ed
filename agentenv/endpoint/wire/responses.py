"""OpenAI's responses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from agentenv.core.messages import JsonValue, Message
from agentenv.endpoint.request import Asked, NotAnswered
from agentenv.endpoint.wire.base import (
    Event,
    Held,
    Json,
    Reply,
    chunks,
    content_of,
    new_id,
    schema_of,
    with_system,
    words,
)
from agentenv.endpoint.wire.chat import chat_call, openai_error

__all__ = ["Responses"]

_IGNORED = ("reasoning", "temperature", "text", "top_p")


class Responses:
    """OpenAI's responses, at `/v1/responses`."""

    id_prefix = "resp_"
    holds = True

    def read(self, body: Json, held: Held) -> Asked:
        """Return the request in a body; see `agentenv.endpoint.wire.base.Wire`."""
        if body.get("conversation") is not None:
            raise NotAnswered(400, "unsupported_value", "send previous_response_id in place of conversation")
        before = _before(body.get("previous_response_id"), held)
        before = with_system(before, str(body.get("instructions") or ""))
        items = body["input"]
        items = [{"role": "user", "content": items}] if isinstance(items, str) else items
        choice = body.get("tool_choice")
        tools, other = _tools(body.get("tools") or ())
        forced = ("tool_choice",) if choice not in (None, "auto", "none") else ()
        return Asked(
            messages=[*before, *held.last.read(items, _messages)],
            tools=[] if choice == "none" else tools,
            model=str(body.get("model") or ""),
            max_tokens=body.get("max_output_tokens"),
            ignored=(*forced, *other, *(name for name in _IGNORED if body.get(name) is not None)),
        )

    def whole(self, reply: Reply) -> Json:
        """Return an answer as one object."""
        return _response(reply, _items(reply))

    def events(self, reply: Reply) -> Iterator[Event]:
        """Yield an answer as the events of a stream."""
        items = _items(reply)
        begun = _response(reply, []) | {"status": "in_progress", "incomplete_details": None, "usage": None}
        done = _response(reply, items)
        events: list[Json] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(items):
            events += _item_events(index, item)
        events.append({"type": f"response.{done['status']}", "response": done})
        for number, event in enumerate(events):
            yield event["type"], {**event, "sequence_number": number}

    def error(self, error: NotAnswered) -> Json:
        """Return an error in the form that the SDKs understand."""
        return openai_error(error)


def _before(id: object, held: Held) -> list[Message]:
    """Return the conversation that a request goes on from."""
    if id is None:
        return []
    if (known := held.get(str(id))) is None:
        raise NotAnswered(400, "previous_response_not_found", f"there is no response {id!r}")
    return list(known[0])


def _messages(items: Sequence[Json]) -> list[Message]:
    """Return items as messages; what the model says between two messages of others is one message."""
    messages: list[Message] = []
    for item in items:
        kind = item.get("type", "message")
        own = kind in {"reasoning", "function_call"} or item.get("role") == "assistant"
        if own:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            _extend(messages[-1], kind, item)
        elif kind == "function_call_output":
            output = content_of(item["output"])
            messages.append({"role": "tool", "tool_call_id": str(item["call_id"]), "content": output})
        elif kind == "message":
            role = "system" if item["role"] == "developer" else str(item["role"])
            messages.append({"role": role, "content": content_of(item["content"])})
        else:
            raise NotAnswered(400, "unsupported_item", f"items of the type {kind!r} are not served")
    return messages


def _extend(message: Message, kind: str, item: Json) -> None:
    """Add an item of the model to its message."""
    if kind == "reasoning":
        message["reasoning_content"] = words(item.get("content")) or words(item.get("summary"))
    elif kind == "function_call":
        call = chat_call(str(item["call_id"]), str(item["name"]), str(item["arguments"] or ""))
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
            inner = _tools(cast("Sequence[Json]", tool["tools"]))
            functions += inner[0]
            other += inner[1]
        else:
            other.append(f"tool_{tool['type']}")
    return functions, other


def _items(reply: Reply) -> list[Json]:
    """Return the output items of an answer."""
    answer = reply.answer
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[Json] = []
    if answer.thinking:
        thought = [{"type": "reasoning_text", "text": answer.thinking}]
        items.append({"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": thought})
    if answer.text or not answer.calls:
        part: Json = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": new_id("msg_"), "role": "assistant", "status": status}
        items.append({**message, "content": [part]})
    for call_id, name, arguments in answer.calls:
        call = {"type": "function_call", "id": new_id("fc_"), "call_id": call_id, "name": name}
        items.append({**call, "arguments": arguments, "status": "completed"})
    return items


def _response(reply: Reply, items: list[Json]) -> Json:
    answer, body = reply.answer, reply.body
    cut = answer.finish_reason == "length"
    return {
        "id": reply.id,
        "object": "response",
        "created_at": int(time.time()),
        "model": reply.asked.model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [],
        "temperature": 1.0,
        "top_p": 1.0,
        "output": items,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _item_events(index: int, item: Json) -> list[Json]:
    """Return the events that stream one item."""
    kind = item["type"]
    at = {"item_id": item["id"], "output_index": index}
    empty: dict[str, Any] = {"arguments": ""} if kind == "function_call" else {"content": []}
    events: list[Json] = [
        {"type": "response.output_item.added", "output_index": index, "item": {**item, **empty}}
    ]
    if kind == "function_call":
        head = "response.function_call_arguments"
        told = {"arguments": item["arguments"], "name": item["name"]}
        events += [{"type": f"{head}.delta", **at, "delta": part} for part in chunks(item["arguments"])]
        events.append({"type": f"{head}.done", **at, **told})
    else:
        part = item["content"][0]
        place = {**at, "content_index": 0}
        head = "response.output_text" if kind == "message" else "response.reasoning_text"
        more: Json = {"logprobs": []} if kind == "message" else {}
        events.append({"type": "response.content_part.added", **place, "part": {**part, "text": ""}})
        events += [{"type": f"{head}.delta", **place, "delta": text, **more} for text in chunks(part["text"])]
        events.append({"type": f"{head}.done", **place, "text": part["text"], **more})
        events.append({"type": "response.content_part.done", **place, "part": part})
    events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    return events
