"""A conversation through a chat API that returns only text. It is recorded and never trained.

Limits use the token counts that the API reports. Text that the API has not counted yet is estimated from
its characters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

from agentenv.core.errors import EngineError
from agentenv.core.limits import RunLimits, least
from agentenv.core.messages import (
    IMAGE_TOKENS,
    MAX_ARGUMENT_CHARS,
    ArgumentError,
    CallStatus,
    ContentPart,
    JsonValue,
    Message,
    ToolCall,
    ToolCallMessage,
    ToolErrorKind,
    decode,
    distinct_calls,
    images_in,
    text_of,
)
from agentenv.core.pictures import pictured
from agentenv.core.refusals import unknown_tool
from agentenv.core.trajectory import Rewrite, TokenSequence
from agentenv.engine.interface import ChatCompletion, ChatEngine, Completion, Sampling, Usage
from agentenv.runner.conversation.conversation import Reply
from agentenv.runner.conversation.fit import CHARS_PER_TOKEN, TurnAnswer, fit_answer
from agentenv.runner.guard import at

if TYPE_CHECKING:
    from agentenv.runner.condense import View

__all__ = ["ChatConversation"]

_COUNTS = tuple(field.name for field in fields(Usage))


class _Estimate:
    """Counts and cuts by characters, for APIs whose tokenizer is not known."""

    def count(self, text: str) -> int:
        """Return the estimated number of tokens of a text."""
        return math.ceil(len(text) / CHARS_PER_TOKEN)

    def trim(self, text: str, max_tokens: int) -> str:
        """Keep head and tail within the estimated tokens."""
        limit = max_tokens * CHARS_PER_TOKEN
        if len(text) <= limit:
            return text
        marker = f"\n[... about {self.count(text) - max_tokens} of {self.count(text)} tokens cut ...]\n"
        kept = max(limit - len(marker), 0)
        return (text[: kept - kept // 2] + marker + text[len(text) - kept // 2 :])[: max(limit, 0)]


class ChatConversation:
    """A conversation through a chat API that returns only text. It is recorded and never trained."""

    def __init__(self, engine: ChatEngine, limits: RunLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._max_context = least(limits.max_context_tokens, engine.max_context_tokens)
        self._messages: list[Message] = []
        self._tools: tuple[Mapping[str, JsonValue], ...] = ()
        self._names: frozenset[str] = frozenset()
        self._used = 0
        self.forks: dict[str, int] = {}
        self.rewrites: list[Rewrite] = []
        self._turn = -1
        self._condensed_by = ""
        self.usage: dict[str, float] = {}
        self.has_policy_tokens = False
        self.takes_images = True
        self.untrainable_reason = f"{engine.name} only speaks text: it returns no token ids and logprobs"

    def start(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]]
    ) -> Sequence[Message]:
        """Start the conversation with an episode's first messages."""
        self._messages = list(map(pictured, messages))
        self._tools = tuple(tools)
        self._names = frozenset(str(cast("Mapping[str, object]", tool["function"])["name"]) for tool in tools)
        self._used = _estimated(self._messages, self._tools)
        return messages

    def begin_with(self, view: View) -> None:
        """Send a condensed view in place of the first messages."""
        self.start(view.messages, self._tools)
        self.rewrites.append(Rewrite(0, view.cause, tuple(self._messages)))

    @property
    def room(self) -> int | None:
        """Tokens left, from the usage that the API reported and an estimate of the text after it."""
        return None if self._max_context is None else self._max_context - self._used

    def generate(
        self, sampling: Sampling, *, turn: int, deadline_s: float | None
    ) -> Awaitable[ChatCompletion]:
        """Ask the API for the next message."""
        messages = tuple(map(_unmarked, self._messages))
        return self._engine.chat(messages, self._tools, sampling, deadline_s=deadline_s)

    def read(self, sampled: Completion | ChatCompletion, *, turn: int) -> Reply:
        """Record the API's message and read its calls."""
        self._turn = turn
        with at("engine"):
            answer = self._checked(sampled)
        with at("parser"):
            message = _distinct_ids(answer.message)
            calls = tuple(map(self._check, message.get("tool_calls") or ()))
            if answer.malformed:
                calls = (_unread(answer, turn),)
        self._messages.append(message)
        counted = answer.usage.prompt_tokens + answer.usage.completion_tokens
        self._used = counted or self._used + _size(message.get("content"))
        for name in _COUNTS:
            if (value := getattr(answer.usage, name)) is not None:
                self.usage[name] = self.usage.get(name, 0.0) + value
        return Reply(message, calls, answer.finish_reason, answer.usage.completion_tokens)

    def _checked(self, sampled: Completion | ChatCompletion) -> ChatCompletion:
        if not isinstance(sampled, ChatCompletion):
            raise EngineError(
                f"turn {self._turn}: the engine returned a {type(sampled).__name__}, not a ChatCompletion"
            )
        if sampled.finish_reason not in {"stop", "length", "content_filter"}:
            raise EngineError(
                f"turn {self._turn}: the engine returned the unknown finish reason {sampled.finish_reason!r}"
            )
        return sampled

    def _check(self, raw: object) -> ToolCall:
        call = ToolCall.from_message(cast("ToolCallMessage", raw))
        if call.name not in self._names:
            told = unknown_tool(call.name, sorted(self._names))
            return replace(call, status=CallStatus.UNKNOWN_TOOL, error=told)
        try:
            values: Any = decode(call.arguments or "{}")
        except ArgumentError as error:
            if error.kind is ToolErrorKind.INVALID_JSON:
                return replace(call, status=CallStatus.INVALID_JSON, error=error.text)
            return call  # JSON that no tool accepts: the tool's own check explains the mistake
        if not isinstance(values, dict):
            return replace(call, status=CallStatus.BAD_ARGUMENTS, error="the arguments must be a JSON object")
        return replace(call, values=values) if len(call.arguments) <= MAX_ARGUMENT_CHARS else call

    def observe(self, reply: Reply, answer: TurnAnswer) -> TurnAnswer | None:
        """Append the answer, cut by the estimate."""
        room = self.room
        fitted = fit_answer(
            answer,
            _estimated_ids,
            _Estimate(),
            room=None if room is None else room - self._limits.min_answer_tokens,
            max_output_tokens=self._limits.max_tool_output_tokens,
            keep=self._limits.tool_output_keep,
        )
        if fitted is None:
            return None
        self._messages.extend(map(pictured, fitted[0].all_messages))
        self._used += len(fitted[1])
        if self._condensed_by:
            self.rewrites.append(Rewrite(self._turn + 1, self._condensed_by, tuple(self._messages)))
            self._condensed_by = ""
        return fitted[0]

    @property
    def view(self) -> Sequence[Message]:
        """Messages that the model was shown, up to its last completion."""
        return tuple(self._messages)

    def used_with(self, answer: TurnAnswer) -> tuple[int, int | None]:
        """Return about how many tokens are used with an answer appended, and the context's limit."""
        return self._used + len(_estimated_ids(answer)), self._max_context

    def go_on_with(self, view: View) -> None:
        """Send the condensed view from now on."""
        self._messages = list(map(pictured, view.messages))
        self._used = _estimated(self._messages, self._tools)
        self.forks[view.cause] = self.forks.get(view.cause, 0) + 1
        self._condensed_by = view.cause

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """An empty tuple, because the API returns no tokens."""
        return ()

    async def release(self) -> None:
        """Do nothing: a chat API keeps no state for an episode."""


def _unread(answer: ChatCompletion, turn: int) -> ToolCall:
    """Return the call that stands for one that the API could not read, so that the model is told."""
    text = text_of(answer.message)
    return ToolCall(f"unread_{turn}", "", "", CallStatus.INVALID_JSON, answer.malformed, text=text)


def _unmarked(message: Message) -> Message:
    """Return a message without the marks of hints, which an API does not know."""
    content = message.get("content")
    if not isinstance(content, list) or not any("hint" in part for part in content):
        return message
    parts = [{name: value for name, value in part.items() if name != "hint"} for part in content]
    return {**message, "content": cast("list[ContentPart]", parts)}


def _distinct_ids(message: Message) -> Message:
    calls = message.get("tool_calls") or ()
    return {**message, "tool_calls": distinct_calls(calls)} if calls else message


def _estimated_ids(answer: TurnAnswer) -> list[int]:
    return [0] * sum(4 + _size(message.get("content")) for message in answer.all_messages)


def _estimated(messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]]) -> int:
    images = sum(images_in(message.get("content")) for message in messages)
    if images:
        messages = [{**message, "content": text_of(message)} for message in messages]
    return images * IMAGE_TOKENS + _Estimate().count(json.dumps([messages, tools], default=str))


def _size(content: str | list[ContentPart] | None) -> int:
    text = content if isinstance(content, str) else text_of({"role": "", "content": content})
    return _Estimate().count(text) + images_in(content) * IMAGE_TOKENS
