"""A conversation on tokens: it appends, and never renders twice what the engine has seen.

What was sampled or sent is sent again as it is. Only where the history is rewritten on purpose does a
new sequence begin.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence

from agentenv.core.errors import EngineError, EngineUnavailable
from agentenv.core.limits import RunLimits
from agentenv.core.messages import JsonValue, Message
from agentenv.core.trajectory import Rewrite, SequenceBuilder, TokenSequence
from agentenv.engine.base import ChatCompletion, Completion, Engine, MayBeUntrainable, Sampling
from agentenv.render.base import RendererProtocol
from agentenv.runner.condense import View
from agentenv.runner.conversation.base import Reply
from agentenv.runner.conversation.estimate import CHARS_PER_TOKEN
from agentenv.runner.conversation.fit import Observation, fit_observation, least
from agentenv.runner.guard import at

__all__ = ["TokenConversation"]


class TokenConversation:
    """A conversation whose tokens are kept as they were sampled and sent."""

    def __init__(
        self,
        engine: Engine,
        renderer: RendererProtocol,
        limits: RunLimits,
        session_id: str,
        *,
        rewrite: bool = False,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._limits = limits
        self._session_id = session_id
        self._max_context = least(limits.max_context_tokens, engine.max_context_tokens)
        self._builder = SequenceBuilder()
        self._closed: list[TokenSequence] = []
        self._rewrite = rewrite
        self._pending: View | None = None
        self.forks: dict[str, int] = {}
        self.rewrites: list[Rewrite] = []
        self.usage: dict[str, float] = {}
        self._history: list[Message] = []
        self._turn = -1
        self._asked_version = 0
        self.untrainable_reason = engine.untrainable_reason if isinstance(engine, MayBeUntrainable) else ""
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

    def generate(self, sampling: Sampling, *, turn: int, deadline_s: float | None) -> Awaitable[Completion]:
        """Sample one completion of the whole context."""
        self._turn = turn
        self._asked_version = self._engine.weights_version
        return self._engine.generate(
            self._builder.token_ids,
            sampling,
            stop_token_ids=self._renderer.stop_token_ids,
            session_id=self._session_id,
            deadline_s=deadline_s,
        )

    def read(self, sampled: Completion | ChatCompletion, *, turn: int) -> Reply:
        """Append the sampled tokens as they are, and parse them."""
        if not isinstance(sampled, Completion):
            with at("engine"):
                raise EngineError(f"turn {turn}: the engine gave {type(sampled).__name__}, no Completion")
        start = len(self._builder)
        # Read before it is recorded, so that every recorded completion has its turn.
        with at("parser"):
            parsed = self._renderer.parse(sampled.token_ids)
        with at("engine"):
            self._append(sampled, turn)
        self._history.append(parsed.message)
        return Reply(
            parsed.message,
            parsed.tool_calls,
            sampled.finish_reason,
            len(sampled.token_ids),
            start,
            len(self._closed),
            sampled.queue_s,
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
        if self._rewrite or self._pending is not None:
            return self._observe_anew(observation)
        sampled = self._builder.token_ids[reply.start :]
        history = self._history[:-1] if self._renderer.report.verdict == "history" else None
        with at("render"):
            fitted = self._fit(
                observation,
                lambda cut: self._renderer.extend(sampled, reply.tool_calls, cut.all_messages, history),
                self.room,
            )
        if fitted is None:
            return None
        self._builder.append("env", fitted[1], turn=self._turn)
        self._history.extend(fitted[0].all_messages)
        return fitted[0]

    def _observe_anew(self, observation: Observation) -> Observation | None:
        """Render the whole conversation again; where that is not what was sent, a new sequence begins.

        What a new sequence carries over is its prompt, whoever sampled it, so that each sampled
        token is trained once: in the sequence in which it was sampled.
        """
        view, self._pending = self._pending, None
        shown = self._history if view is None else list(view.messages)
        with at("render"):
            fitted = self._fit(
                observation,
                lambda cut: self._renderer.start([*shown, *cut.all_messages]),
                self._max_context,
            )
        if fitted is None:
            return None
        cut, ids = fitted
        size = len(self._builder)
        self._history = [*shown, *cut.all_messages]
        if ids[:size] == self._builder.token_ids:
            self._builder.append("env", ids[size:], turn=self._turn)
            return cut
        cause = "rewrite" if view is None else view.cause
        self.forks[cause] = self.forks.get(cause, 0) + 1
        if view is not None:
            self.rewrites.append(Rewrite(self._turn + 1, cause, tuple(self._history)))
        self._closed.append(self._builder.freeze())
        self._builder = SequenceBuilder()
        start, end = self._place_of("" if view is None else view.written, ids)
        self._builder.append("prompt", ids[:start], turn=self._turn)
        self._builder.append("other", ids[start:end], turn=self._turn)
        self._builder.append("prompt", ids[end:], turn=self._turn)
        return cut

    def _fit(
        self, observation: Observation, render: Callable[[Observation], list[int]], room: int | None
    ) -> tuple[Observation, list[int]] | None:
        return fit_observation(
            observation,
            render,
            self._renderer,
            room=None if room is None else room - self._limits.min_answer_tokens,
            max_output_tokens=self._limits.max_tool_output_tokens,
            keep=self._limits.tool_output_keep,
        )

    def _place_of(self, written: str, ids: Sequence[int]) -> tuple[int, int]:
        """Where the tokens of a summary stand; tokens shared with what surrounds it are not its own."""
        if not written:
            return len(ids), len(ids)
        wanted = self._renderer.count(written)
        decode = self._renderer.decode
        found = decode(ids).find(written)
        if found < 0:
            return len(ids), len(ids)
        # The summary's tokens number about `wanted`; their first is where the decoded text reaches it.
        start = bisect_left(range(len(ids)), found, key=lambda place: len(decode(ids[:place])))
        end = bisect_right(
            range(min(start + 2 * wanted + 8, len(ids)) + 1),
            found + len(written),
            lo=start,
            key=lambda place: len(decode(ids[:place])),
        )
        return start, max(start, end - 1)

    @property
    def view(self) -> Sequence[Message]:
        """The messages that the model was shown, up to its last completion."""
        return tuple(self._history)

    def used_with(self, observation: Observation) -> tuple[int, int | None]:
        """Tokens in use with an observation: its texts are estimated, not encoded."""
        return len(self._builder) + sum(map(len, observation.texts)) // CHARS_PER_TOKEN, self._max_context

    def go_on_with(self, view: View) -> None:
        """Let the next observation follow a condensed view."""
        self._pending = view

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """The tokens of the episode; none before its first prompt."""
        return (*self._closed, self._builder.freeze()) if len(self._builder) else ()

    async def release(self) -> None:
        """Let the engine forget the episode's cache."""
        await self._engine.release(self._session_id)
