"""Engines that give the completions of a recorded episode, then a live engine's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentenv.core.errors import EngineError
from agentenv.core.messages import JsonValue, Message
from agentenv.core.trajectory import Trajectory, Turn
from agentenv.engine.base import ChatCompletion, ChatEngine, Completion, Engine, Sampling, Usage

__all__ = ["ChatReplayEngine", "ReplayEngine"]


class ReplayEngine:
    """Gives the completions of a record in order; after `turns` of them, a live engine's.

    Args:
        record: an episode with tokens.
        turns: recorded turns to play; all by default.
        live: plays on from there; without it, being asked for more is an error.
    """

    def __init__(self, record: Trajectory, *, turns: int | None = None, live: Engine | None = None) -> None:
        self.name = f"replay:{record.group_id}/{record.member}"
        self.weights_version = live.weights_version if live is not None else 0
        self.max_context_tokens = live.max_context_tokens if live is not None else None
        self._record = record
        self._turns = len(record.turns) if turns is None else turns
        self._played = 0
        self._live = live

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Completion:
        """Give the next recorded completion; see `agentenv.engine.base.Engine`.

        Raises:
            EngineError: The record is at its end and there is no live engine.
        """
        self._played += 1
        if self._played <= self._turns:
            return _completion(self._record, self._record.turns[self._played - 1])
        if self._live is None:
            raise EngineError(f"the record has {self._turns} turns to play, and another was asked for")
        return await self._live.generate(
            prompt_ids,
            sampling,
            stop_token_ids=stop_token_ids,
            session_id=session_id,
            deadline_s=deadline_s,
        )

    async def release(self, session_id: str) -> None:
        """Let the live engine forget the episode."""
        if self._live is not None:
            await self._live.release(session_id)

    async def close(self) -> None:
        """Leave the live engine to its owner."""


class ChatReplayEngine:
    """Gives the messages of a record without tokens in order; then a live engine's."""

    def __init__(
        self, record: Trajectory, *, turns: int | None = None, live: ChatEngine | None = None
    ) -> None:
        self.name = f"replay:{record.group_id}/{record.member}"
        self.max_context_tokens = live.max_context_tokens if live is not None else None
        self._record = record
        self._turns = len(record.turns) if turns is None else turns
        self._played = 0
        self._live = live

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JsonValue]],
        sampling: Sampling,
        *,
        deadline_s: float | None = None,
    ) -> ChatCompletion:
        """Give the next recorded message; see `agentenv.engine.base.ChatEngine`.

        Raises:
            EngineError: The record is at its end and there is no live engine.
        """
        self._played += 1
        if self._played <= self._turns:
            turn = self._record.turns[self._played - 1]
            return ChatCompletion(turn.message, Usage(completion_tokens=turn.num_tokens), turn.finish_reason)
        if self._live is None:
            raise EngineError(f"the record has {self._turns} turns to play, and another was asked for")
        return await self._live.chat(messages, tools, sampling, deadline_s=deadline_s)

    async def close(self) -> None:
        """Leave the live engine to its owner."""


def _completion(record: Trajectory, turn: Turn) -> Completion:
    sequence = record.sequences[turn.sequence]
    spans = [span for span in sequence.spans if span.turn == turn.index and span.source in {"model", "other"}]
    ids = tuple(sequence.token_ids[turn.start : turn.end])
    if not all(span.trained for span in spans):
        return Completion(ids, (), turn.finish_reason, sampled_by_policy=False)
    ranges: list[tuple[int, int, int]] = []
    start = 0
    for span in spans:
        ranges.append((span.weights_version or 0, start, start + len(span)))
        start += len(span)
    logprobs = tuple(sequence.logprobs[turn.start : turn.end])
    return Completion(ids, logprobs, turn.finish_reason, tuple(ranges))
