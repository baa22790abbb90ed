"""OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentenv.core.messages import JsonValue, Message, ToolCallMessage, chat_call
from agentenv.endpoint.request import Answer, Asked, Kind, NotAnswered, Progress
from agentenv.endpoint.wire.common import (
    LIST,
    OBJECT,
    Conversations,
    Event,
    Head,
    Json,
    Stream,
    arguments_of,
    chunks,
    content_of,
    given,
    role_of,
    schema_of,
    seed_of,
    texts_of,
    tokens_of,
    words,
)
from agentenv.endpoint.wire.fields import CHAT, ignored_in, ignored_in_messages, ignored_in_tools
from agentenv.endpoint.wire.forms import choice_of, form_of, schema_in

__all__ = ["ChatCompletions", "openai_error"]


class ChatCompletions:
    """OpenAI's chat completions, at `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    holds = False

    def read(self, body: Json, held: Conversations) -> Asked:
        """Return the request in a body; see `agentenv.endpoint.wire.common.Wire`."""
        choice, sent = body.get("tool_choice"), given(body, "tools", LIST)
        tools = [_tool(tool) for tool in sent]
        many = body.get("parallel_tool_calls") is None or given(body, "parallel_tool_calls", bool)
        stop = body.get("stop")
        ignored = [*ignored_in(body, CHAT), *ignored_in_tools(sent)]

        def convert(raw: list[Any]) -> list[Message]:
            ignored.extend(ignored_in_messages(raw))
            return [_message(message) for message in raw]

        messages = held.last.read(given(body, "messages", LIST), convert)
        _check_end(body, messages)
        given(body, "stream_options", OBJECT)
        return Asked(
            messages=messages,
            tools=tools,
            model=str(body.get("model") or ""),
            tool_choice=choice_of(choice),
            form=form_of(choice, tools, schema_in(given(body, "response_format", OBJECT)), many=many),
            parallel_calls=many,
            max_tokens=tokens_of(body, "max_completion_tokens", "max_tokens"),
            stream=given(body, "stream", bool),
            stop=(stop,) if isinstance(stop, str) and stop else texts_of(body, "stop"),
            seed=seed_of(body),
            ignored=tuple(ignored),
        )

    def whole(self, head: Head, answer: Answer) -> Json:
        """Return an answer as one object."""
        message: Json = {"role": "assistant", "content": answer.text or None}
        if answer.thinking:
            # DeepSeek's name for it, which servers of open models took over; OpenAI's API has none.
            message["reasoning_content"] = answer.thinking
        if answer.calls:
            message["tool_calls"] = [chat_call(*call) for call in answer.calls]
        choice = {"index": 0, "message": message, "finish_reason": _reason(answer), "logprobs": None}
        return {**_head("chat.completion", head), "choices": [choice], "usage": _usage(answer)}

    def stream(self, head: Head) -> Stream:
        """Return what makes the events of a streamed answer."""
        return _ChatStream(head)

    def error(self, error: NotAnswered) -> Json:
        """Return an error in the form that the SDKs understand."""
        return openai_error(error)


class _ChatStream:
    """An answer that is streamed as chunks; see `agentenv.endpoint.wire.common.Stream`."""

    def __init__(self, head: Head) -> None:
        self._head = _head("chat.completion.chunk", head)
        self._usage = bool((head.body.get("stream_options") or {}).get("include_usage"))

    def begin(self, progress: Progress) -> Iterator[Event]:
        yield self._chunk({"role": "assistant", "content": ""})

    def part(self, kind: Kind, text: str) -> Iterator[Event]:
        yield self._chunk({"reasoning_content" if kind == "thinking" else "content": text})

    def end(self, answer: Answer) -> Iterator[Event]:
        # Calls come last and whole: until the reply ends it is not certain that they can be read.
        for index, (call_id, name, arguments) in enumerate(answer.calls):
            yield self._chunk({"tool_calls": [{"index": index, **chat_call(call_id, name, "")}]})
            for part in chunks(arguments):
                yield self._chunk({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
        yield self._chunk({}, _reason(answer))
        if self._usage:
            yield "", {**self._head, "choices": [], "usage": _usage(answer)}
        yield "", "[DONE]"

    def failed(self, error: NotAnswered) -> Iterator[Event]:
        yield "", openai_error(error)

    def _chunk(self, delta: Json, reason: str | None = None) -> Event:
        return "", {**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def openai_error(error: NotAnswered) -> Json:
    """Return an error in OpenAI's form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def _head(kind: str, head: Head) -> Json:
    return {"id": head.id, "object": kind, "created": int(time.time()), "model": head.asked.model}


def _usage(answer: Answer) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _reason(answer: Answer) -> str:
    # Before the calls, because a client runs what ends with "tool_calls", and a cut reply runs nothing.
    if answer.finish_reason in ("length", "content_filter"):
        return answer.finish_reason
    return "tool_calls" if answer.calls else "stop"


def _check_end(body: Json, messages: Sequence[Message]) -> None:
    """Refuse what servers of open models read as another end of the prompt than that of the messages.

    Raises:
        NotAnswered: The model would go on from another place than the request says.
    """
    begun = bool(messages) and messages[-1]["role"] == "assistant"
    wanted = {"continue_final_message": begun, "add_generation_prompt": not begun}
    for name, value in wanted.items():
        if body.get(name) is not None and given(body, name, bool) is not value:
            ends = "the beginning of the reply" if begun else "no message of the assistant"
            told = f"{name} is {body[name]}, and the last message is {ends}: leave it out"
            raise NotAnswered(400, "invalid_value", told)


def _tool(tool: Json) -> Mapping[str, JsonValue]:
    if tool.get("type", "function") != "function":
        raise NotAnswered(400, "unsupported_tool", f"tools of the type {tool.get('type')!r} are not served")
    function = tool["function"]
    return schema_of(function["name"], function.get("description"), function.get("parameters"))


def _message(message: Json) -> Message:
    """Return a message with the fields that a chat template reads, and no others."""
    role = role_of(message, "system", "developer", "user", "assistant", "tool")
    content = message.get("content")
    # Templates print the assistant's content as it is, so it is one text, without what was no text of it.
    content = words(content or message.get("refusal")) if role == "assistant" else content_of(content)
    read: Message = {"role": role, "content": content}
    if thinking := message.get("reasoning_content") or message.get("reasoning"):
        read["reasoning_content"] = words(thinking)
    if call_id := message.get("tool_call_id"):
        read["tool_call_id"] = str(call_id)
    if message.get("name") and role == "tool":
        read["name"] = str(message["name"])
    if calls := message.get("tool_calls"):
        read["tool_calls"] = _calls(calls)
    return read


def _calls(calls: Sequence[Json]) -> list[ToolCallMessage]:
    return [
        chat_call(str(call["id"]), str(call["function"]["name"]), arguments_of(call["function"]))
        for call in calls
    ]
