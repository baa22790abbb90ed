"""The record of an episode: turns, tokens, rewards, and why it ended.

`terminated` and `truncated` follow from the stop reason, never from the last token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from math import isfinite
from typing import Literal

from agentenv.core.errors import AlignmentError
from agentenv.core.messages import JsonValue, Message, ToolCall, ToolResult
from agentenv.core.sequence import SequenceBuilder, Source, TokenSequence, TokenSpan

__all__ = [
    "EpisodeError",
    "Rewrite",
    "SequenceBuilder",
    "Source",
    "StopReason",
    "TokenSequence",
    "TokenSpan",
    "Trajectory",
    "TrajectoryGroup",
    "Turn",
]


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
class Rewrite:
    """From a turn on, the model was shown a condensed conversation instead of the record's messages."""

    turn: int
    """Index of the first turn after it."""
    cause: str
    messages: tuple[Message, ...]
    """What that turn was shown; the record's messages go on from there."""


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
    rewrites: tuple[Rewrite, ...] = ()
    """Where the conversation was condensed; empty if never."""
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
