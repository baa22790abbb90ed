"""What an engine returned for a request, and what the client is sent of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentenv.core.errors import EngineError, EngineUnavailable, UsageError
from agentenv.core.images import ImageTokens
from agentenv.core.messages import JsonValue, Message, ToolCall, text_of
from agentenv.endpoint.placing import Place
from agentenv.endpoint.request import Asked
from agentenv.engine.interface import (
    ChatCompletion,
    ChatEngine,
    Completion,
    Engine,
    FinishReason,
    OnTokens,
    Sampling,
    features_of,
    shown,
)

if TYPE_CHECKING:
    from agentenv.render.renderer import Renderer

__all__ = [
    "Taken",
    "as_sent",
    "calls_of",
    "chat",
    "complete",
    "formed",
    "permitted",
    "size_of",
    "with_beginning",
]

UNREAD_CALLS = 3
"""How often a model is asked again before a call that its API cannot read counts as its answer."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What the engine returned for a request."""

    sampled: Completion | ChatCompletion
    reply: Message
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    sampling: Sampling
    version: int
    seconds: float


def as_sent(taken: Taken) -> tuple[Message, str | None]:
    """Return the message that the client gets, and the stop string that ended it."""
    message: Message = {**taken.reply}
    if taken.finish_reason != "stop":
        message.pop("tool_calls", None)  # a call that was cut off must not run
    content = message.get("content")
    stop = None
    if isinstance(content, str):
        found = [(content.find(text), text) for text in taken.sampling.stop if text in content]
        if found:
            position, stop = min(found)
            message["content"] = content[:position]
    return message, stop


def permitted(
    asked: Asked, reply: Message, calls: tuple[ToolCall, ...], counts: Counter[str]
) -> tuple[Message, tuple[ToolCall, ...]]:
    """Return a reply without the calls that the request forbids.

    They are counted, as are a missing call and text that has not the output format: a script plays what it
    holds, an API does not always follow, and a reply may be cut.
    """
    if asked.form is not None and not reply.get("tool_calls"):
        if asked.form.schema is None:
            counts["calls_against_tool_choice"] += 1
        elif not _has_form(text_of(reply), asked.form.schema):
            counts["ignored_output_format"] += 1
    listed = reply.get("tool_calls") or []
    most = 0 if asked.tool_choice == "none" else len(listed) if asked.parallel_calls else 1
    if len(listed) <= most:
        return reply, calls
    against = "parallel_tool_calls" if most else "tool_choice"
    counts[f"calls_against_{against}"] += len(listed) - most
    message: Message = {**reply, "tool_calls": listed[:most]}
    if not most:
        del message["tool_calls"]
    kept = {call["id"] for call in listed[:most]}
    return message, tuple(call for call in calls if call.id in kept)


def with_beginning(begun: Sequence[Message], message: Message) -> Message:
    """Return a reply with the text with which the client began it."""
    return {**message, "content": text_of(begun[0]) + text_of(message)} if begun else message


async def complete(
    engine: Engine,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    renderer: Renderer,
    name: str,
    left: float | None,
    on_tokens: OnTokens | None,
    images: Sequence[ImageTokens] = (),
) -> Completion:
    """Ask an engine for a completion, whose tokens are told as they are sampled if the engine can do so.

    Args:
        engine: the engine.
        prompt_ids: the whole context.
        sampling: the sampling settings.
        renderer: has the stop tokens.
        name: name under which the engine keeps its cache.
        left: seconds that are left; None without a limit.
        on_tokens: is told the tokens; None if nobody wants to know.
        images: the images of the context.

    Raises:
        EngineError: There are images, and the engine's model sees none.
    """
    features = features_of(engine)
    if images and not features.images:
        raise EngineError(f"{engine.name} sees no images", remedy="send text")
    further: dict[str, Any] = {"stop_token_ids": renderer.stop_token_ids, "session_id": name}
    further |= {"deadline_s": left, **shown(images)}
    if on_tokens is None or features.stream is None:
        return await engine.generate(prompt_ids, sampling, **further)
    return await features.stream(prompt_ids, sampling, on_tokens, **further)


async def chat(
    engine: Engine | ChatEngine,
    asked: Asked,
    messages: Sequence[Message],
    sampling: Sampling,
    *,
    left: float | None,
    counts: Counter[str],
) -> ChatCompletion:
    """Ask an engine that only speaks text.

    Raises:
        EngineError: The engine works on tokens.
        EngineUnavailable: It gave up.
    """
    if not isinstance(engine, ChatEngine):
        raise EngineError(f"{engine.name} works on tokens, and the session has no renderer")
    takes = asked.form is not None and features_of(engine).forms
    further: dict[str, Any] = {"form": asked.form} if takes else {}
    sampled = await engine.chat(messages, asked.tools, sampling, deadline_s=left, **further)
    for _ in range(UNREAD_CALLS):
        if not sampled.malformed:
            break
        # An agent's client knows no call that could not be read, so the model is told here.
        counts["malformed_calls"] += 1
        told: Message = {"role": "user", "content": sampled.malformed}
        messages = [*messages, sampled.message, told]
        sampled = await engine.chat(messages, asked.tools, sampling, deadline_s=left, **further)
    if sampled.finish_reason == "abort":
        raise EngineUnavailable(f"{engine.name} gave up")
    return sampled


def _has_form(text: str, schema: Mapping[str, JsonValue]) -> bool:
    """Return whether text is JSON, with the required fields where the schema is one of objects."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if schema.get("type") != "object":
        return True
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return isinstance(value, dict) and all(name in value for name in names)


def calls_of(message: Message) -> tuple[ToolCall, ...]:
    """Return the calls of a message of a chat API."""
    return tuple(ToolCall.from_message(call) for call in message.get("tool_calls") or ())


def size_of(sampled: Completion | ChatCompletion) -> int:
    """Return the number of sampled tokens."""
    return len(sampled.token_ids) if isinstance(sampled, Completion) else sampled.usage.completion_tokens


def formed(
    sampling: Sampling, asked: Asked, place: Place, engine: Engine | ChatEngine, counts: Counter[str]
) -> Sampling:
    """Return the settings with the grammar of what the reply must be.

    A chat engine may ask its API for the form by itself. Another engine that cannot sample by a grammar
    answers as it likes: a choice of tools that it never saw is counted here, and its reply by `permitted`.

    Raises:
        UsageError: The client began the reply.
        RenderError: No grammar is known for the way in which this model writes.
    """
    features = features_of(engine)
    if asked.form is None or features.forms:
        return sampling
    if place.begun:
        raise UsageError("a reply that is begun cannot be made to call a tool or to be JSON")
    if place.renderer is None or not features.grammars:
        if asked.form.schema is None:
            counts["ignored_tool_choice"] += 1
        return sampling
    return replace(sampling, grammar=place.renderer.grammar(asked.form))
