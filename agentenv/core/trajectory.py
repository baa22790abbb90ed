"""The record of an episode: its turns, tokens and rewards, and the reason why it ended.

`terminated` and `truncated` are derived from the stop reason, never from the last token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from math import isfinite
from typing import Literal

from agentenv.core.errors import AlignmentError
from agentenv.core.faults import is_foreign
from agentenv.core.messages import JsonValue, Message, ToolCall, ToolResult, text_of
from agentenv.core.sequence import SequenceBuilder, Source, TokenSequence, TokenSpan
from agentenv.core.visible import one_line

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
    """Why an episode ended. Every episode has exactly one of these reasons."""

    FINAL_ANSWER = "final_answer"
    """The model answered in text, which ends an episode of this environment."""
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
    """The context had no room for another completion, or the first prompt did not fit."""
    GENERATION_LENGTH = "generation_length"
    """A completion reached its length limit and was cut; its tool calls were not run."""
    CONTENT_FILTER = "content_filter"
    """A filter of a chat API refused the conversation or withheld the answer. The episode is scored."""
    TOOL_OUTPUT_OVERFLOW = "tool_output_overflow"
    """An observation filled the context, even after it was trimmed."""
    ENV_TRUNCATED = "env_truncated"
    """`step` returned `truncated=True`."""
    DEADLINE = "deadline"
    """A time limit of the turn or the episode ran out."""
    ABORTED = "aborted"
    """The engine, the sandbox or other infrastructure failed. The episode may be retried and is never
    trained on."""
    ERROR = "error"
    """Code of the environment, a reward, the parser or a user raised. The episode is never trained on and
    does not count in group statistics."""

    @property
    def terminated(self) -> bool:
        """True if the episode reached the end of its task."""
        return self in _TERMINATED

    @property
    def truncated(self) -> bool:
        """True if a limit or a filter ended the episode early."""
        return not self.terminated and not self.failed

    @property
    def failed(self) -> bool:
        """True if the episode has no outcome, because it was aborted or code raised."""
        return self in {StopReason.ABORTED, StopReason.ERROR}

    @property
    def remedy(self) -> str:
        """What to do where many episodes end for this reason; empty if nothing is known that helps."""
        return _REMEDIES.get(self, "")


_REMEDIES = {
    StopReason.MAX_TURNS: "raise max_turns, or make the task need fewer turns",
    StopReason.GENERATION_LENGTH: "raise max_tokens_per_turn; tool calls of a cut-off turn are not run",
    StopReason.CONTEXT_LENGTH: "raise max_context_tokens, lower max_tool_output_tokens, or use a condenser",
    StopReason.TOOL_OUTPUT_OVERFLOW: "lower max_tool_output_tokens, or let tools return output in pages",
    StopReason.MAX_TOOL_CALLS: "raise max_tool_calls",
    StopReason.MAX_PARSE_ERRORS: "the model does not keep to the tool-call format; see `agentenv doctor`",
    StopReason.DEADLINE: "raise episode_timeout_s or turn_timeout_s, or lower concurrency",
}
_TERMINATED = frozenset(
    {
        StopReason.FINAL_ANSWER,
        StopReason.ENV_TERMINATED,
        StopReason.ENV_DONE,
        StopReason.USER_DONE,
    }
)


_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EpisodeError:
    """What went wrong in an episode, and in which part."""

    boundary: Literal[
        "env", "tool", "engine", "reward", "parser", "sandbox", "user", "render", "agent", "worker"
    ]
    type: str
    """Class name of the exception."""
    message: str
    traceback: str = ""
    retryable: bool = False
    """True if infrastructure failed and another attempt may succeed."""

    @property
    def where(self) -> str:
        """File, line and function of the innermost frame outside this library and installed packages.

        It is empty if the traceback has no such frame.
        """
        frames = [frame for frame in _FRAME.finditer(self.traceback) if is_foreign(frame["file"])]
        frames = [frame for frame in frames if "site-packages" not in frame["file"]]
        return f"{frames[-1]['file']}:{frames[-1]['line']} in {frames[-1]['name']}" if frames else ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion of the model and the answer to it."""

    index: int
    message: Message
    """The parsed completion."""
    finish_reason: Literal["stop", "length", "abort", "content_filter"]
    num_tokens: int
    """Number of tokens sampled in the completion."""
    sequence: int = 0
    """Index of the sequence that holds the completion's tokens."""
    start: int = 0
    """Position of the completion's first token in that sequence."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    """One result for each answered call, in call order."""
    reward: float = 0.0
    """Reward from the environment or user after this turn. The final reward is added to the last turn's."""
    sampling: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Temperature, top_p, top_k, min_p, stop strings, seed and token limit of this generation."""
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds spent in the parts of the turn: `generate_s`, `queue_s`, `env_s`, `tools_s`, `user_s`,
    `render_s`."""
    attempt: int = 0
    """Index of the model's attempt at the task, where the environment marks attempts (`Context.attempt`). All
    of them are in one episode; `Trajectory.attempt` counts episodes that were played again."""

    @property
    def end(self) -> int:
        """Position after the completion's last token in its sequence."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A place where another conversation begins; later turns saw `messages` instead of the record's.

    The runner condenses a long conversation. An agent with a loop of its own begins as many conversations as
    it likes: the turns of each stand together in the record, and each after the first begins with a rewrite.
    """

    turn: int
    """Index of the first turn that saw the other conversation."""
    cause: str
    """Name of the condenser, or how the request of an agent differs from what was recorded: `new`, `edited`,
    `tools`, `system`, `forked` or `parallel`; see `agentenv.endpoint.Session`."""
    messages: tuple[Message, ...]
    """Messages that this turn saw; later messages of the record follow them."""
    parent: int | None = None
    """Index of the sequence whose tokens the new one begins with; None if it shares none."""
    shared_tokens: int = 0
    """Number of tokens at the beginning of the sequence that were taken over from the parent."""
    tools: tuple[Mapping[str, JsonValue], ...] | None = None
    """Schemas of the tools of the other conversation, which an agent chooses for each; None if they are those
    of the episode."""


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
    """Index of the episode in its group, from 0."""
    attempt: int = 0
    """Number of earlier attempts at this episode that were aborted."""
    branch_of: int | None = None
    """Member that sampled the first turns of this episode, which were played again here and are not trained
    on; None if the episode sampled all its turns."""
    shared_turns: int = 0
    """Number of these turns."""
    turns: tuple[Turn, ...] = ()
    sequences: tuple[TokenSequence, ...] = ()
    """The tokens: one sequence, several if the history was rewritten, none if the engine works with text."""
    messages: tuple[Message, ...] = ()
    reward: float | None = None
    """Sum of the turn rewards; None if the episode cannot be scored."""
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    """Parts of the final reward by name."""
    error: EpisodeError | None = None
    untrainable_reason: str = ""
    """Why the episode must not be trained on; empty if it may."""
    task: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    tools: tuple[Mapping[str, JsonValue], ...] = ()
    """Schemas of the tools that the model was shown; an agent may show others in its later conversations."""
    rewrites: tuple[Rewrite, ...] = ()
    """Places where the conversation was condensed or an agent began another one; usually empty."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds spent in each part, summed over the turns, and `total_s` for the whole episode."""
    digest: str = field(default="", compare=False)
    """Digest of the record, which a run stores with it; empty if no run has stored it. Whoever changes a
    record that was read must empty it, or the verifier says that the record was changed."""
    other_seats: tuple[Trajectory, ...] = ()
    """Episodes of the other seats that the policy played in the same game. Groups, stores and trainers get
    them as episodes of their own; a stored record does not hold them."""

    def __post_init__(self) -> None:
        if self.stop_reason.failed != (self.error is not None):
            raise AlignmentError(
                f"stop reason {self.stop_reason.value!r} does not fit error {self.error!r}: an episode has "
                "an error exactly if it failed"
            )
        if self.stop_reason.failed and not self.untrainable_reason:
            raise AlignmentError("a failed episode must say why it is not trainable")
        if self.reward is not None and not isfinite(self.reward):
            raise AlignmentError(f"reward {self.reward!r} is not finite")
        if self.sequences:
            sampled = sum(sequence.num_trained_tokens for sequence in self.sequences)
            counted = sum(turn.num_tokens for turn in self.turns)
            if sampled > counted:
                raise AlignmentError(
                    f"{sampled} tokens are under the loss mask, but the turns sampled only {counted}"
                )
            sizes = [len(sequence) for sequence in self.sequences]
            for turn in self.turns:
                if turn.end > sizes[turn.sequence]:
                    raise AlignmentError(
                        f"turn {turn.index} ends at token {turn.end}, "
                        f"but its sequence has only {sizes[turn.sequence]}"
                    )

    @property
    def terminated(self) -> bool:
        """True if the episode reached the end of its task."""
        return self.stop_reason.terminated

    @property
    def truncated(self) -> bool:
        """True if a limit ended the episode early."""
        return self.stop_reason.truncated

    @property
    def trainable(self) -> bool:
        """True if a trainer may use the episode."""
        return not self.untrainable_reason

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Rewards of the assistant turns, in order."""
        return tuple(turn.reward for turn in self.turns)

    @property
    def weights_versions(self) -> tuple[int, ...]:
        """Versions of the weights that sampled this episode, in ascending order."""
        spans = chain.from_iterable(sequence.spans for sequence in self.sequences)
        return tuple(sorted({span.weights_version for span in spans if span.weights_version is not None}))

    @property
    def all_tools(self) -> tuple[Mapping[str, JsonValue], ...]:
        """Schemas of the tools of all conversations, each once."""
        shown = chain(self.tools, *(rewrite.tools or () for rewrite in self.rewrites))
        return tuple({str(tool): tool for tool in shown}.values())

    def tools_at(self, turn: int) -> tuple[Mapping[str, JsonValue], ...]:
        """Return the schemas of the tools that the model was shown at a turn."""
        begun = [rewrite.tools for rewrite in self.rewrites if rewrite.turn <= turn]
        last = begun[-1] if begun else None
        return self.tools if last is None else last

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens sampled in all turns."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def answer(self) -> str:
        """Text of the last assistant message, without calls that cannot be read; empty if there is none."""
        for turn in reversed(self.turns):
            content = text_of(turn.message)
            for call in turn.tool_calls:
                if call.text:
                    content = content.replace(call.text, "").strip()
            return content
        return ""

    def __repr__(self) -> str:
        ended = f"{self.stop_reason.value} after {len(self.turns)} turns"
        tokens = f"{self.num_sampled_tokens} sampled tokens" if self.sequences else None
        task = f"task {self.task_id} member {self.member}"
        return one_line(self, f"reward {_number(self.reward)}", ended, tokens, self.env_id, task)


def _number(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """Trajectories of one task whose rewards are compared with each other, in the order of their members.

    Raises:
        AlignmentError: The group is empty or mixes tasks or environments.
    """

    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise AlignmentError("a group needs at least one trajectory")
        identities = {(member.env_id, member.task_id, member.group_id) for member in self.trajectories}
        if len(identities) != 1:
            raise AlignmentError(
                "the trajectories of a group must have the same environment, task and group id"
            )

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __getitem__(self, member: int) -> Trajectory:
        return self.trajectories[member]

    def __repr__(self) -> str:
        rewards = " ".join(_number(member.reward) for member in self)
        first = self.trajectories[0]
        return one_line(self, f"{len(self)} of {first.env_id} task {first.task_id}", f"rewards {rewards}")

    @property
    def group_id(self) -> str:
        """The group's id, shared by its members."""
        return self.trajectories[0].group_id

    @property
    def usable(self) -> tuple[Trajectory, ...]:
        """Members that may be trained on and have a reward."""
        return tuple(member for member in self.trajectories if member.trainable and member.reward is not None)

    @property
    def outcomes(self) -> dict[StopReason, int]:
        """Number of members for each stop reason; the numbers sum to the group's size."""
        counts: dict[StopReason, int] = {}
        for member in self.trajectories:
            counts[member.stop_reason] = counts.get(member.stop_reason, 0) + 1
        return counts
