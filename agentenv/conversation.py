"""One episode's talk with the model: on tokens, or through an API that only speaks text.

Both kinds answer the same calls, so the episode loop knows neither. The token kind appends and
never renders twice what the engine has seen: what was sampled or sent is sent again as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from agentenv.boundary import at
from agentenv.budget import Observation, fit_observation
from agentenv.engine.base import ChatCompletion, ChatEngine, Completion, Engine, Sampling
from agentenv.errors import EngineError, EngineUnavailable
from agentenv.limits import RunLimits
from agentenv.messages import CallStatus, JsonValue, Message, ToolCall, ToolCallMessage
from agentenv.render.base import RendererProtocol
from agentenv.trajectory import SequenceBuilder, TokenSequence

__all__ = ["ChatConversation", "Conversation", "Reply", "TokenConversation"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One completion, read."""

    message: Message
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    num_tokens: int
    start: int = 0
    """First token of the completion in its sequence."""
    sequence: int = 0
    queue_s: float = 0.0


class Conversation(Protocol):
    """What the episode loop asks of a conversation."""

    untrainable_reason: str
    """Why nothing of this conversation may be trained on; empty if it may."""
    has_policy_tokens: bool
    """True once the policy itself sampled a token."""

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]]) -> None:
        """Begin with an episode's first messages."""
        ...

    @property
    def room(self) -> int | None:
        """Tokens left in the context; None without a limit."""
        ...

    async def generate(
        self, sampling: Sampling, *, turn: int, deadline_s: float | None
    ) -> Completion | object:
        """Ask the model; gives what `read` takes."""
        ...

    def read(self, raw: object, *, turn: int) -> Reply:
        """Record a completion and read it."""
        ...

    def observe(self, reply: Reply, observation: Observation) -> Observation | None:
        """Answer a reply, cut to what fits; None if nothing fits."""
        ...

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """The tokens of the episode."""
        ...

    async def release(self) -> None:
        """Let the engine forget the episode."""
        ...


class TokenConversation:
    """A conversation whose tokens are kept as they were sampled and sent."""

    def __init__(
        self, engine: Engine, renderer: RendererProtocol, limits: RunLimits, session_id: str
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._limits = limits
        self._session_id = session_id
        self._max_context = _least(limits.max_context_tokens, engine.max_context_tokens)
        self._builder = SequenceBuilder()
        self._history: list[Message] = []
        self._turn = -1
        self._asked_version = 0
        self.untrainable_reason = ""
        self.has_policy_tokens = False

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]]) -> None:
        """Render the first prompt: the only full render of the episode."""
        with at("render"):
            self._renderer = self._renderer.bind(tools)
            self._builder.append("prompt", self._renderer.start(messages))
        self._history = list(messages)

    @property
    def room(self) -> int | None:
        """Tokens left in the context; None without a limit."""
        return None if self._max_context is None else self._max_context - len(self._builder)

    async def generate(self, sampling: Sampling, *, turn: int, deadline_s: float | None) -> Completion:
        """Sample one completion of the whole context."""
        self._turn = turn
        self._asked_version = self._engine.weights_version
        return await self._engine.generate(
            self._builder.token_ids,
            sampling,
            stop_token_ids=self._renderer.stop_token_ids,
            session_id=self._session_id,
            deadline_s=deadline_s,
        )

    def read(self, raw: object, *, turn: int) -> Reply:
        """Append the sampled tokens as they are, and parse them."""
        completion = cast("Completion", raw)
        start = len(self._builder)
        # Read before it is recorded, so that every recorded completion has its turn.
        with at("parser"):
            parsed = self._renderer.parse(completion.token_ids)
        with at("engine"):
            self._append(completion, turn)
        self._history.append(parsed.message)
        return Reply(
            parsed.message,
            parsed.tool_calls,
            completion.finish_reason,
            len(completion.token_ids),
            start,
            queue_s=completion.queue_s,
        )

    def _append(self, completion: Completion, turn: int) -> None:
        ids = completion.token_ids
        if not ids:
            raise EngineUnavailable(f"turn {turn}: the engine returned no token, not even a stop token")
        if completion.finish_reason not in {"stop", "length"}:
            raise EngineError(
                f"turn {turn}: unknown finish reason {completion.finish_reason!r} of the engine"
            )
        if not completion.sampled_by_policy:
            self._builder.append("other", ids, turn=turn)
            return
        ranges = completion.version_ranges or ((self._asked_version, 0, len(ids)),)
        self._builder.append_completion(ids, completion.logprobs, ranges, turn=turn)
        self.has_policy_tokens = True

    def observe(self, reply: Reply, observation: Observation) -> Observation | None:
        """Append the observation, framed and followed by the next generation prompt."""
        room = self.room
        builder = self._builder
        sampled = builder.token_ids[reply.start :]

        def render(cut: Observation) -> list[int]:
            return self._renderer.extend(sampled, reply.tool_calls, cut.all_messages, history)

        history = self._history[:-1] if self._renderer.report.verdict == "history" else None
        with at("render"):
            fitted = fit_observation(
                observation,
                render,
                self._renderer,
                room=None if room is None else room - self._limits.min_answer_tokens,
                max_output_tokens=self._limits.max_tool_output_tokens,
            )
            if fitted is None:
                return None
            builder.append("env", fitted[1], turn=self._turn)
        self._history.extend(fitted[0].all_messages)
        return fitted[0]

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """The tokens of the episode; none before its first prompt."""
        return (self._builder.freeze(),) if len(self._builder) else ()

    async def release(self) -> None:
        """Let the engine forget the episode's cache."""
        await self._engine.release(self._session_id)


CHARS_PER_TOKEN = 4
"""Estimate used where an API counts tokens but gives no tokenizer."""


class _Estimate:
    """Count and cut by characters: an estimate, used with APIs that only speak text."""

    def count(self, text: str) -> int:
        """Estimated tokens of a text."""
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
    """A conversation through an API that only speaks text: recorded, never trained."""

    def __init__(self, engine: ChatEngine, limits: RunLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._max_context = _least(limits.max_context_tokens, engine.max_context_tokens)
        self._messages: list[Message] = []
        self._tools: tuple[Mapping[str, JsonValue], ...] = ()
        self._names: frozenset[str] = frozenset()
        self._used = 0
        self.has_policy_tokens = False
        self.untrainable_reason = f"{engine.name} only speaks text: no token ids and logprobs"

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]]) -> None:
        """Begin with an episode's first messages."""
        self._messages = list(messages)
        self._tools = tuple(tools)
        self._names = frozenset(str(cast("Mapping[str, object]", tool["function"])["name"]) for tool in tools)
        self._used = _Estimate().count(json.dumps([self._messages, self._tools], default=str))

    @property
    def room(self) -> int | None:
        """Tokens left, from the reported usage and an estimate of what came after it."""
        return None if self._max_context is None else self._max_context - self._used

    async def generate(self, sampling: Sampling, *, turn: int, deadline_s: float | None) -> object:
        """Ask the API for the next message."""
        return await self._engine.chat(tuple(self._messages), self._tools, sampling, deadline_s=deadline_s)

    def read(self, raw: object, *, turn: int) -> Reply:
        """Record the API's message and read its calls."""
        answer = cast("ChatCompletion", raw)
        with at("engine"):
            if answer.finish_reason not in {"stop", "length"}:
                raise EngineError(
                    f"turn {turn}: unknown finish reason {answer.finish_reason!r} of the engine"
                )
        with at("parser"):
            calls = tuple(map(self._check, answer.message.get("tool_calls") or ()))
        self._messages.append(answer.message)
        self._used = answer.usage.prompt_tokens + answer.usage.completion_tokens
        return Reply(answer.message, calls, answer.finish_reason, answer.usage.completion_tokens)

    def _check(self, raw: object) -> ToolCall:
        call = ToolCall.from_message(cast("ToolCallMessage", raw))
        if call.name not in self._names:
            known = ", ".join(sorted(self._names)) or "none"
            return replace(
                call, status=CallStatus.UNKNOWN_TOOL, error=f"no tool named {call.name!r}; tools: {known}"
            )
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError as error:
            return replace(
                call, status=CallStatus.INVALID_JSON, error=f"the arguments are not valid JSON: {error}"
            )
        if not isinstance(arguments, dict):
            return replace(call, status=CallStatus.BAD_ARGUMENTS, error="the arguments must be a JSON object")
        return call

    def observe(self, reply: Reply, observation: Observation) -> Observation | None:
        """Record the observation, cut by the estimate."""
        room = self.room
        fitted = fit_observation(
            observation,
            _estimated_ids,
            _Estimate(),
            room=None if room is None else room - self._limits.min_answer_tokens,
            max_output_tokens=self._limits.max_tool_output_tokens,
        )
        if fitted is None:
            return None
        self._messages.extend(fitted[0].all_messages)
        self._used += len(fitted[1])
        return fitted[0]

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """None: the API gives no tokens."""
        return ()

    async def release(self) -> None:
        """Nothing is kept for an episode."""


def _estimated_ids(observation: Observation) -> list[int]:
    return [0] * sum(4 + _Estimate().count(text) for text in observation.texts)


def _least(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)
