"""Engines that replay the completions of a recorded episode, and may then go on with a live engine.

An agent with a loop of its own may lead several conversations, also at once, which the record holds one after
the other. So each request gets the recorded turn that followed this very prompt. A prompt that was not
recorded gets the next turn, so that the first difference can be told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from agentenv.core.errors import EngineError
from agentenv.core.images import ImageTokens, keys_of
from agentenv.core.messages import JsonValue, Message, text_of
from agentenv.core.trajectory import Trajectory, Turn
from agentenv.engine.interface import (
    NOT_KEPT,
    ChatCompletion,
    ChatEngine,
    Completion,
    Engine,
    Features,
    Sampling,
    Usage,
    features_of,
    shown,
)

__all__ = ["ChatReplayEngine", "ReplayEngine"]


UNCUT: Mapping[str, float | str] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "grammar": ""}
"""Settings that cut the distribution, with the values that cut nothing."""


_Live = TypeVar("_Live", Engine, ChatEngine)


class _Replaying(Generic[_Live]):
    """The recorded turns that wait to be replayed, and the live engine after them; both engines begin so."""

    def __init__(self, record: Trajectory, *, turns: int | None = None, live: _Live | None = None) -> None:
        self.name = f"replay:{record.group_id}/{record.member}"
        self.max_context_tokens: int | None = live.max_context_tokens if live is not None else None
        self._record = record
        self._turns = len(record.turns) if turns is None else turns
        self._waiting = list(record.turns[: self._turns])
        self._live = live

    @property
    def _after(self) -> _Live:
        """The live engine, which goes on from here.

        Raises:
            EngineError: There is none.
        """
        if self._live is None:
            raise EngineError(
                f"the record has only {self._turns} turns to replay", remedy="pass a live engine to continue"
            )
        return self._live

    async def close(self) -> None:
        """Do nothing: the live engine belongs to the caller, who closes it."""


class ReplayEngine(_Replaying[Engine]):
    """Returns the recorded completions; after `turns` of them, a live engine takes over.

    Args:
        record: an episode with tokens.
        turns: number of recorded turns to replay; all if None.
        live: engine for the turns after the recorded ones, which several episodes then share: their tokens
            are not trained on, and every prompt must be the recorded one. Without it, a further turn is an
            error.
    """

    def __init__(self, record: Trajectory, *, turns: int | None = None, live: Engine | None = None) -> None:
        super().__init__(record, turns=turns, live=live)
        self.weights_version = live.weights_version if live is not None else 0

    @property
    def features(self) -> Features:
        """Those of the live engine, but for streams, because recorded turns are returned whole.

        The recorded completions have seen their images and followed their grammars.
        """
        if self._live is None:
            return Features(images=True, grammars=True)
        return replace(features_of(self._live), stream=None)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
        images: Sequence[ImageTokens] = (),
    ) -> Completion:
        """Return the next recorded completion; see `agentenv.engine.Engine`.

        Raises:
            EngineError: All recorded turns were replayed and there is no live engine, or shared turns do not
                follow the recorded prompt.
        """
        if self._waiting:
            keys = keys_of(prompt_ids, images)
            return self._recorded(keys, self._next(keys))
        return await self._after.generate(
            prompt_ids,
            sampling,
            stop_token_ids=stop_token_ids,
            session_id=session_id,
            deadline_s=deadline_s,
            **shown(images),
        )

    def _next(self, prompt: list[int]) -> Turn:
        """Return the first waiting turn that followed this prompt, as keys; the first of all if none did."""
        for place, turn in enumerate(self._waiting):
            # The length is compared first, because most prompts differ in it.
            if turn.start == len(prompt) and self._prompt_of(turn) == prompt:
                return self._waiting.pop(place)
        return self._waiting.pop(0)

    def _prompt_of(self, turn: Turn) -> list[int]:
        return self._record.sequences[turn.sequence].keys[: turn.start]

    def _recorded(self, prompt: list[int], turn: Turn) -> Completion:
        done = _completion(self._record, turn)
        if self._live is None:
            return done
        if prompt != self._prompt_of(turn):
            raise _parted(self.name, turn)
        return replace(done, logprobs=(), version_ranges=(), sampled_by_policy=False, supports=None)

    async def release(self, session_id: str) -> None:
        """Tell the live engine to forget the episode."""
        if self._live is not None:
            await self._live.release(session_id)


class ChatReplayEngine(_Replaying[ChatEngine]):
    """Returns the messages of a record; then a live engine takes over.

    Args:
        record: an episode.
        turns: number of recorded turns to replay; all if None.
        live: engine for the turns after the recorded ones, which several episodes then share, so that the
            messages before each of them must be the recorded ones. Without it, a further turn is an error.
    """

    def __init__(
        self,
        record: Trajectory,
        *,
        turns: int | None = None,
        live: ChatEngine | None = None,
    ) -> None:
        super().__init__(record, turns=turns, live=live)
        self._shown = _conversations(record)
        # Where the conversation was condensed, the model was shown other messages than the recorded ones.
        self._shared = live is not None and not record.rewrites

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JsonValue]],
        sampling: Sampling,
        *,
        deadline_s: float | None = None,
    ) -> ChatCompletion:
        """Return the next recorded message; see `agentenv.engine.ChatEngine`.

        Raises:
            EngineError: All recorded turns were replayed and there is no live engine, or shared turns do not
                follow the recorded messages.
        """
        if self._waiting:
            turn = self._next(messages)
            if self._shared and tuple(messages) != self._record.messages[: len(messages)]:
                raise _parted(self.name, turn)
            return ChatCompletion(turn.message, Usage(completion_tokens=turn.num_tokens), turn.finish_reason)
        return await self._after.chat(messages, tools, sampling, deadline_s=deadline_s)

    def _next(self, messages: Sequence[Message]) -> Turn:
        """Return the first waiting turn that followed this conversation; the first of all if none did."""
        said = [_essence(message) for message in messages]
        for place, turn in enumerate(self._waiting):
            if self._shown.get(turn.index) == said:
                return self._waiting.pop(place)
        return self._waiting.pop(0)


def _essence(message: Message) -> tuple[str, str]:
    """Return what of a message stays the same whatever a client does to it."""
    return message["role"], text_of(message).strip()


def _conversations(record: Trajectory) -> dict[int, list[tuple[str, str]]]:
    """Return the messages that the model was shown before each turn, by the index of the turn."""
    said = [place for place, message in enumerate(record.messages) if message["role"] == "assistant"]
    said = said[len(said) - len(record.turns) :]  # a first observation may have examples, which are no turns
    begun = {rewrite.turn: rewrite.messages for rewrite in record.rewrites}
    shown: dict[int, list[tuple[str, str]]] = {}
    now: list[tuple[str, str]] = []
    for index, place in enumerate(said):
        if index in begun:
            now = [_essence(message) for message in begun[index]]
        else:
            start = said[index - 1] if index else 0
            now = [*now, *map(_essence, record.messages[start:place])]
        shown[index] = now
    return shown


def _parted(name: str, turn: Turn) -> EngineError:
    return EngineError(
        f"{name}: the conversation before turn {turn.index} is not the recorded one, so this turn cannot be "
        "shared",
        remedy="replay the episode to see the first difference; the environment must answer as it did, and "
        "limits and tokenizer must be those of the record",
    )


def _completion(record: Trajectory, turn: Turn) -> Completion:
    sequence = record.sequences[turn.sequence]
    spans = [span for span in sequence.spans if span.turn == turn.index and span.source in {"model", "other"}]
    ids = tuple(sequence.token_ids[turn.start : turn.end])
    if not all(span.trained for span in spans):
        return Completion(ids, (), turn.finish_reason, sampled_by_policy=False, replayed=True)
    ranges: list[tuple[int, int, int]] = []
    start = 0
    for span in spans:
        ranges.append((span.weights_version or 0, start, start + len(span)))
        start += len(span)
    logprobs = tuple(sequence.logprobs[turn.start : turn.end])
    routed = sequence.routed_experts
    if routed is not None:
        routed = routed.part(0, turn.end - 1) if len(routed) >= turn.end - 1 else None
    supports = sequence.supports_of(turn.start, turn.end)
    return Completion(
        ids,
        logprobs,
        turn.finish_reason,
        tuple(ranges),
        replayed=True,
        routed_experts=routed,
        supports=supports,
        no_supports=NOT_KEPT if supports is None and _was_cut(turn.sampling) else "",
    )


def _was_cut(sampling: Mapping[str, Any]) -> bool:
    """Return whether a turn with these recorded settings was sampled from a cut distribution."""
    cuts = any(sampling.get(name, none) not in (None, none) for name, none in UNCUT.items())
    return cuts and sampling.get("temperature") != 0
