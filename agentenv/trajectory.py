"""The record of an episode: tokens by source, with every aligned view derived from them.

Invariants, held by construction and tried by `tests/property/test_trajectory.py`:

1. A span has logprobs exactly when the policy sampled it, one finite number per token.
2. `token_ids`, `loss_mask`, `logprobs` and `turn_index` of a sequence have one length.
3. `loss_mask[i]` is true exactly on tokens that the policy sampled; elsewhere the logprob is 0.0.
4. A cut is a prefix of every view. Appending never changes what was there.
5. `terminated` and `truncated` follow from the stop reason, never from the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, repeat
from math import isfinite
from typing import Literal, TypeAlias, TypeVar

from agentenv.errors import AlignmentError
from agentenv.messages import JsonValue, Message, ToolCall, ToolResult

__all__ = [
    "EpisodeError",
    "SequenceBuilder",
    "Source",
    "StopReason",
    "TokenSequence",
    "TokenSpan",
    "Trajectory",
    "TrajectoryGroup",
    "Turn",
]

Source: TypeAlias = Literal["prompt", "model", "env", "other"]
"""Who wrote a token; `other` is another model than the policy, never trained."""

_SOURCES = frozenset({"prompt", "model", "env", "other"})
_T = TypeVar("_T")

MAX_LOGPROB = 1e-3
"""Largest logprob taken as rounding of 0; anything above is not a probability."""


class StopReason(StrEnum):
    """Why an episode ended. Closed: every episode has exactly one."""

    FINAL_ANSWER = "final_answer"
    """The model answered in text and the environment takes that as the end."""
    ENV_TERMINATED = "env_terminated"
    """`step` returned `terminated=True`."""
    ENV_DONE = "env_done"
    """`is_done()` was true after a step."""
    USER_DONE = "user_done"
    """The simulated user ended the conversation."""
    MAX_TURNS = "max_turns"
    MAX_USER_TURNS = "max_user_turns"
    MAX_TOOL_CALLS = "max_tool_calls"
    MAX_PARSE_ERRORS = "max_parse_errors"
    CONTEXT_LENGTH = "context_length"
    """No room was left for a completion; also a first prompt that does not fit."""
    GENERATION_LENGTH = "generation_length"
    """The engine cut a completion at its length; its tool calls were not run."""
    TOOL_OUTPUT_OVERFLOW = "tool_output_overflow"
    """An observation filled the context, even after it was trimmed."""
    ENV_TRUNCATED = "env_truncated"
    """`step` returned `truncated=True`."""
    DEADLINE = "deadline"
    """A time limit of the turn or the episode ran out."""
    ABORTED = "aborted"
    """Engine, sandbox or other infrastructure failed: may be retried, never trained."""
    ERROR = "error"
    """Environment, reward, parser or user code raised: never trained, not in group statistics."""

    @property
    def terminated(self) -> bool:
        """True if the task came to its own end."""
        return self in _TERMINATED

    @property
    def truncated(self) -> bool:
        """True if a limit cut the episode."""
        return not self.terminated and not self.failed

    @property
    def failed(self) -> bool:
        """True if the episode has no outcome: aborted or error."""
        return self in {StopReason.ABORTED, StopReason.ERROR}


_TERMINATED = frozenset(
    {
        StopReason.FINAL_ANSWER,
        StopReason.ENV_TERMINATED,
        StopReason.ENV_DONE,
        StopReason.USER_DONE,
    }
)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A run of tokens from one source, in one turn.

    Raises:
        AlignmentError: Logprobs and tokens disagree, or a logprob is not a log-probability.
    """

    source: Source
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    """Natural log, at the sampling temperature; present exactly when the source is the model."""
    weights_version: int | None = None
    """Weights that sampled the span; only for the model's."""
    turn: int = -1
    """Index of the assistant turn that the span belongs to; -1 for the first prompt."""

    def __post_init__(self) -> None:
        if self.source not in _SOURCES:
            raise AlignmentError(f"unknown token source {self.source!r}; one of {sorted(_SOURCES)}")
        if self.source != "model":
            if self.logprobs is not None:
                raise AlignmentError(f"a {self.source} span must not have logprobs")
            return
        if self.logprobs is None:
            raise AlignmentError("a model span needs the engine's logprobs, one for each token")
        if len(self.logprobs) != len(self.token_ids):
            raise AlignmentError(f"{len(self.token_ids)} sampled tokens but {len(self.logprobs)} logprobs")
        if _all_logprobs(self.logprobs):
            return
        for index, logprob in enumerate(self.logprobs):
            if not isinstance(logprob, (int, float)) or not isfinite(logprob) or logprob > MAX_LOGPROB:
                raise AlignmentError(f"logprob {logprob!r} of sampled token {index} is not ln(p) <= 0")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def trained(self) -> bool:
        """True if the loss covers these tokens."""
        return self.source == "model"


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Spans in order; the aligned views of length `len(sequence)` are derived from them."""

    spans: tuple[TokenSpan, ...]

    def __len__(self) -> int:
        return sum(map(len, self.spans))

    @property
    def token_ids(self) -> list[int]:
        """Every token id, in order."""
        return list(chain.from_iterable(span.token_ids for span in self.spans))

    @property
    def loss_mask(self) -> list[bool]:
        """True exactly on tokens that the policy sampled."""
        return self._spread(lambda span: repeat(span.trained, len(span)))

    @property
    def logprobs(self) -> list[float]:
        """The sampler's logprob of each token; 0.0 outside the loss mask."""
        return self._spread(lambda span: span.logprobs or repeat(0.0, len(span)))

    @property
    def turn_index(self) -> list[int]:
        """The assistant turn of each token; -1 in the first prompt."""
        return self._spread(lambda span: repeat(span.turn, len(span)))

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens under the loss mask."""
        return sum(len(span) for span in self.spans if span.trained)

    def cut(self, length: int) -> TokenSequence:
        """Return the first `length` tokens; a prefix in every view.

        Raises:
            ValueError: `length` is negative.
        """
        if length < 0:
            raise ValueError(f"cannot cut a sequence to {length} tokens")
        kept: list[TokenSpan] = []
        for span in self.spans:
            if length <= 0:
                break
            kept.append(span if len(span) <= length else _cut_span(span, length))
            length -= len(span)
        return TokenSequence(tuple(kept))

    def _spread(self, view: Callable[[TokenSpan], Iterator[_T] | Sequence[_T]]) -> list[_T]:
        return list(chain.from_iterable(map(view, self.spans)))


def _all_logprobs(values: tuple[float, ...]) -> bool:
    """Say at the speed of C that all is well; what is not is then looked for one by one."""
    return set(map(type, values)) <= {float} and all(map(isfinite, values)) and max(values, default=0.0) <= 0


def _cut_span(span: TokenSpan, length: int) -> TokenSpan:
    logprobs = None if span.logprobs is None else span.logprobs[:length]
    return TokenSpan(span.source, span.token_ids[:length], logprobs, span.weights_version, span.turn)


class SequenceBuilder:
    """Grow a sequence by appending; a turn costs the length of what is new.

    `token_ids` is the flat list that the engine gets as its prompt: it is read, never written,
    by others. Empty appends leave no span.
    """

    __slots__ = ("_spans", "token_ids")

    def __init__(self) -> None:
        self._spans: list[TokenSpan] = []
        self.token_ids: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_spans(self) -> int:
        """Spans so far."""
        return len(self._spans)

    def append(
        self,
        source: Source,
        token_ids: Sequence[int],
        *,
        logprobs: Sequence[float] | None = None,
        weights_version: int | None = None,
        turn: int = -1,
    ) -> None:
        """Append one span.

        Raises:
            AlignmentError: The span breaks an invariant; nothing is appended then.
        """
        flat = None if logprobs is None else tuple(logprobs)
        span = TokenSpan(source, tuple(token_ids), flat, weights_version, turn)
        if span.token_ids:
            self._spans.append(span)
            self.token_ids.extend(span.token_ids)

    def append_completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        version_ranges: Sequence[tuple[int, int, int]],
        *,
        turn: int,
    ) -> None:
        """Append a completion; where it crosses a weight update it becomes adjacent spans.

        Args:
            token_ids: the sampled ids.
            logprobs: one for each id.
            version_ranges: `(weights_version, start, end)`, covering the ids in order.
            turn: index of the assistant turn.

        Raises:
            AlignmentError: Lengths disagree, or the ranges do not cover the ids.
        """
        if logprobs is None or len(logprobs) != len(token_ids):
            count = "no" if logprobs is None else str(len(logprobs))
            raise AlignmentError(f"turn {turn}: {len(token_ids)} sampled tokens but {count} logprobs")
        starts = [start for _, start, _ in version_ranges]
        ends = [end for _, _, end in version_ranges]
        if token_ids and (
            [*starts, len(token_ids)] != [0, *ends] or any(a >= b for a, b in zip(starts, ends, strict=True))
        ):
            raise AlignmentError(
                f"turn {turn}: weight versions {list(version_ranges)} do not cover {len(token_ids)} tokens"
            )
        spans = [
            TokenSpan("model", tuple(token_ids[start:end]), tuple(logprobs[start:end]), version, turn)
            for version, start, end in version_ranges
        ]
        for span in spans:
            if span.token_ids:
                self._spans.append(span)
                self.token_ids.extend(span.token_ids)

    def freeze(self) -> TokenSequence:
        """Return the immutable sequence of what was appended so far."""
        return TokenSequence(tuple(self._spans))


@dataclass(frozen=True, slots=True)
class EpisodeError:
    """What went wrong in an episode, and at which boundary."""

    boundary: Literal["env", "tool", "engine", "reward", "parser", "sandbox", "user", "render"]
    type: str
    """Name of the exception's class."""
    message: str
    traceback: str = ""
    retryable: bool = False
    """True for infrastructure that may work on another attempt."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model completion and what it was answered."""

    index: int
    message: Message
    """The completion, parsed."""
    finish_reason: Literal["stop", "length", "abort"]
    num_tokens: int
    """Sampled tokens of the completion."""
    sequence: int = 0
    """Index of the sequence that holds the completion's tokens."""
    start: int = 0
    """First token of the completion in that sequence."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    """One for each answered call, in call order."""
    reward: float = 0.0
    """Given by the environment or user after this turn; the final reward is in the last turn's."""
    sampling: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Temperature, top_p, top_k, min_p, seed and limit of this generation."""
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds: `generate_s`, `queue_s`, `env_s`, `tools_s`, `user_s`, `render_s`."""

    @property
    def end(self) -> int:
        """One past the completion's last token in its sequence."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The immutable record of one finished episode.

    Raises:
        AlignmentError: Turns and sequences disagree, or a failed episode claims to be trainable.
    """

    env_id: str
    task_id: str
    seed: int
    group_id: str
    stop_reason: StopReason
    member: int = 0
    """Place in the group, from 0."""
    attempt: int = 0
    """Earlier attempts at this episode that were aborted."""
    turns: tuple[Turn, ...] = ()
    sequences: tuple[TokenSequence, ...] = ()
    """One, unless the history was rewritten; none for an engine that only speaks text."""
    messages: tuple[Message, ...] = ()
    reward: float | None = None
    """Sum of the turn rewards; None when the episode cannot be scored."""
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    """Named parts."""
    error: EpisodeError | None = None
    untrainable_reason: str = ""
    """Why the episode must not be trained on; empty if it may."""
    task: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    tools: tuple[Mapping[str, JsonValue], ...] = ()
    """Schemas of the tools that the model was shown."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds, summed over the turns, and `total_s`."""

    def __post_init__(self) -> None:
        if self.stop_reason.failed != (self.error is not None):
            raise AlignmentError(
                f"stop reason {self.stop_reason.value!r} with error {self.error!r}: one implies the other"
            )
        if self.stop_reason.failed and not self.untrainable_reason:
            raise AlignmentError("a failed episode must say why it is not trainable")
        if self.reward is not None and not isfinite(self.reward):
            raise AlignmentError(f"reward {self.reward!r} is not finite")
        if self.sequences:
            sampled = sum(sequence.num_trained_tokens for sequence in self.sequences)
            counted = sum(turn.num_tokens for turn in self.turns)
            if sampled > counted:
                raise AlignmentError(f"{sampled} tokens under the loss mask, but turns sampled {counted}")
            sizes = [len(sequence) for sequence in self.sequences]
            for turn in self.turns:
                if turn.end > sizes[turn.sequence]:
                    raise AlignmentError(f"turn {turn.index} ends at {turn.end}, past its sequence")

    @property
    def terminated(self) -> bool:
        """True if the task came to its own end."""
        return self.stop_reason.terminated

    @property
    def truncated(self) -> bool:
        """True if a limit cut the episode."""
        return self.stop_reason.truncated

    @property
    def trainable(self) -> bool:
        """True if a trainer may use the episode."""
        return not self.untrainable_reason

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Reward of each assistant turn, in order."""
        return tuple(turn.reward for turn in self.turns)

    @property
    def weights_versions(self) -> tuple[int, ...]:
        """Weights that sampled this episode, ascending."""
        spans = chain.from_iterable(sequence.spans for sequence in self.sequences)
        return tuple(sorted({span.weights_version for span in spans if span.weights_version is not None}))

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens sampled over all turns."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def answer(self) -> str:
        """Text of the last assistant message; empty if there is none."""
        for turn in reversed(self.turns):
            content = turn.message.get("content")
            return content if isinstance(content, str) else ""
        return ""


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """Trajectories of one task, compared together; order is by member and stable.

    Raises:
        AlignmentError: The group is empty or mixes tasks or environments.
    """

    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise AlignmentError("a group needs at least one trajectory")
        if len({(one.env_id, one.task_id, one.group_id) for one in self.trajectories}) != 1:
            raise AlignmentError("a group holds trajectories of one environment, task and group id")

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def group_id(self) -> str:
        """The group's id, shared by its members."""
        return self.trajectories[0].group_id

    @property
    def usable(self) -> tuple[Trajectory, ...]:
        """Members that may be trained on and have a reward."""
        return tuple(one for one in self.trajectories if one.trainable and one.reward is not None)

    @property
    def outcomes(self) -> dict[StopReason, int]:
        """Members by stop reason; the counts sum to the group's size."""
        counts: dict[StopReason, int] = {}
        for one in self.trajectories:
            counts[one.stop_reason] = counts.get(one.stop_reason, 0) + 1
        return counts
