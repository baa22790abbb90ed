"""A small summary of each episode, which has what tables and statistics need but no tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

from agentenv.core.messages import CallStatus, text_of
from agentenv.core.seats import game_of
from agentenv.core.trajectory import StopReason, Trajectory
from agentenv.core.visible import one_line

__all__ = [
    "ENCODE",
    "Encoded",
    "EpisodeKey",
    "EpisodeSummary",
    "ToolUse",
    "answer_key",
    "encode",
    "index_line",
    "summarize",
    "with_played",
]

EpisodeKey: TypeAlias = tuple[str, str, str, int]
"""Environment, task, group and member, which identify an episode; all its attempts share the key."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_VARYING = re.compile(r"'[^']*'|\bid\W{1,3}[\w-]+|(?=[\w-]*\d)[\w-]+", re.IGNORECASE)
"""Quoted values, ids, addresses and numbers in the text of an error, which differ from episode to episode."""
_MAX_ANSWER_CHARS = 200
_MAX_TASK_CHARS = 160
"""Most characters of a task's text in a summary. Each episode has a summary, and a run may have very many."""


class ToolUse(NamedTuple):
    """One tool call that got a result."""

    name: str
    duration_s: float
    error_kind: str = ""
    """Kind of the error; empty if the call succeeded."""
    error: str = ""
    """First line of the error text that the model received; empty if the call succeeded."""


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """The facts about one episode that tables, statistics and lists use."""

    env_id: str
    task_id: str
    group_id: str
    member: int
    stop_reason: StopReason
    seed: int = 0
    attempt: int = 0
    branch_of: int | None = None
    """Member whose first turns this episode shares, as in `Trajectory`; `metrics` has the number of turns."""
    reward: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    num_turns: int = 0
    total_tokens: int = 0
    """Number of tokens of all sequences: prompt, sampled and observed tokens."""
    sampled_tokens: int = 0
    trained_tokens: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    """Source and length of each span of the last sequence."""
    num_trimmed: int = 0
    """Number of tool results that were shortened."""
    num_parse_errors: int = 0
    tools: tuple[ToolUse, ...] = ()
    error: str = ""
    """Boundary, type and message of the error that ended the episode; empty if there was none."""
    where: str = ""
    """File, line and function in which the error was raised, as far as they are known."""
    untrainable_reason: str = ""
    answer: str = ""
    """The normalised final answer, which `majority@k` compares; see `answer_key`."""
    said: str = ""
    """Beginning of the final answer, on one line, as the model wrote it."""
    question: str = ""
    """Beginning of the first observation, on one line, so that lists can say what the task was."""
    expected: str = ""
    """Beginning of the task's field `answer`; empty if the task has none."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    offset: int = 0
    """Offset of the episode's line in `trajectories.jsonl`, in bytes."""
    size: int = 0
    """Number of bytes of the line, with its line break."""

    def __repr__(self) -> str:
        reward = None if self.reward is None else f"reward {self.reward:g}"
        task = f"task {self.task_id} member {self.member}"
        return one_line(
            self, reward, f"{self.stop_reason.value} after {self.num_turns} turns", self.env_id, task
        )

    @property
    def key(self) -> EpisodeKey:
        """The key that identifies the episode."""
        return (self.env_id, self.task_id, self.group_id, self.member)

    @property
    def failure(self) -> tuple[str, str]:
        """Where the error was raised, and its text without what differs from episode to episode.

        Two episodes failed for one reason if both are equal. Both are empty if there was no error.
        """
        return self.where, _VARYING.sub("#", self.error.replace(self.task_id, "#"))

    @property
    def scored(self) -> bool:
        """True if the episode has a reward and did not fail, so that it counts in means."""
        return self.reward is not None and not self.stop_reason.failed


def answer_key(text: str) -> str:
    r"""Return the part of an answer that is compared between the episodes of a task.

    This is the content of the last `\boxed{...}`; without one, the last number; and without a number, the
    text in lower case with single spaces.
    """
    boxed = _BOXED.findall(text)
    if boxed:
        return str(boxed[-1]).strip()
    numbers = _NUMBER.findall(text)
    if numbers:
        plain = str(numbers[-1]).replace(",", "")
        return plain.rstrip("0").rstrip(".") if "." in plain and "e" not in plain.lower() else plain
    return " ".join(text.lower().split())[:_MAX_ANSWER_CHARS]


def summarize(trajectory: Trajectory, *, offset: int = 0, size: int = 0) -> EpisodeSummary:
    """Return the summary of an episode."""
    results = [result for turn in trajectory.turns for result in turn.tool_results]
    calls = [call for turn in trajectory.turns for call in turn.tool_calls]
    spans = trajectory.sequences[-1].spans if trajectory.sequences else ()
    error = trajectory.error
    return EpisodeSummary(
        env_id=trajectory.env_id,
        task_id=trajectory.task_id,
        group_id=trajectory.group_id,
        member=trajectory.member,
        stop_reason=trajectory.stop_reason,
        seed=trajectory.seed,
        attempt=trajectory.attempt,
        branch_of=trajectory.branch_of,
        reward=trajectory.reward,
        rewards=dict(trajectory.rewards),
        num_turns=len(trajectory.turns),
        total_tokens=sum(map(len, trajectory.sequences)),
        sampled_tokens=trajectory.num_sampled_tokens,
        trained_tokens=sum(sequence.num_trained_tokens for sequence in trajectory.sequences),
        parts=tuple((span.source, len(span)) for span in spans),
        num_trimmed=sum(result.trimmed for result in results),
        num_parse_errors=sum(call.status not in (CallStatus.OK, CallStatus.IN_THINKING) for call in calls),
        tools=tuple(
            ToolUse(
                result.name,
                result.duration_s,
                result.error_kind.value if result.error_kind else "",
                _first_line(result.text) if result.error_kind else "",
            )
            for result in results
        ),
        error="" if error is None else f"{error.boundary}: {error.type}: {_first_line(error.message)}",
        where="" if error is None else error.where,
        untrainable_reason=trajectory.untrainable_reason,
        answer=answer_key(trajectory.answer),
        said=_beginning(trajectory.answer),
        question=_beginning(_first_observation(trajectory)),
        expected=_beginning(_as_text(trajectory.task.get("answer"))),
        metrics=dict(trajectory.metrics),
        timings=dict(trajectory.timings),
        offset=offset,
        size=size,
    )


def _first_observation(trajectory: Trajectory) -> str:
    """Return the text of the first message that is neither an instruction of the system nor the model's."""
    for message in trajectory.messages:
        role = message.get("role")
        if role == "assistant":
            return ""
        if role not in {"system", "developer"}:
            try:
                return text_of(message)
            except (AttributeError, TypeError):  # the content is none of a message, so nothing can be shown
                return ""
    return ""


def _as_text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    from agentenv.runs.store.codec import dumps

    return dumps(value)


def _beginning(text: str) -> str:
    """Return the first characters of a text on one line. Only the beginning of a long text is looked at."""
    words = " ".join(text[: 4 * _MAX_TASK_CHARS].split())
    shortened = len(words) > _MAX_TASK_CHARS or len(text) > 4 * _MAX_TASK_CHARS
    return words[: _MAX_TASK_CHARS - 1] + "…" if shortened else words


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _MAX_ANSWER_CHARS else line[: _MAX_ANSWER_CHARS - 1] + "…"


def index_line(summary: EpisodeSummary) -> bytes:
    """Return the line of an episode in the index file, without empty values (a reward of 0.0 is kept)."""
    from agentenv.runs.store.codec import dumps

    values = ((field.name, getattr(summary, field.name)) for field in fields(summary))
    return dumps({name: value for name, value in values if value or value == 0.0}).encode() + b"\n"


def decode_summary(data: dict[str, Any]) -> EpisodeSummary:
    """Return the summary that a JSON object of the index describes.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: The object does not describe a summary.
    """
    known = {name: value for name, value in data.items() if name in EpisodeSummary.__dataclass_fields__}
    known["stop_reason"] = StopReason(known["stop_reason"])
    if "tools" in known:
        known["tools"] = tuple(ToolUse(*item) for item in known["tools"])
    if "parts" in known:
        known["parts"] = tuple((str(source), int(length)) for source, length in known["parts"])
    return EpisodeSummary(**known)


def with_played(
    terms: tuple[str, ...], summaries: Sequence[EpisodeSummary], expected: int | None
) -> tuple[str, ...]:
    """Return the terms of a mean, and how many episodes were played if it is not all that were expected."""
    played = len({(game_of(each.group_id), each.member) for each in summaries})
    if expected is None or played >= expected:
        return terms
    return (*terms, f"only {played:,} of {expected:,} episodes played")


ENCODE = f"{__name__}:encode"
"""Name of `encode`, with which workers find it."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A finished episode, ready to be written."""

    line: bytes
    """The line of the episode, with its line break."""
    summary: EpisodeSummary
    """The summary; the offset of the line is 0 as long as it is not known."""


def encode(trajectory: Trajectory, *, offset: int = 0) -> Encoded:
    """Return what a run stores of an episode.

    Args:
        trajectory: the episode.
        offset: offset of its line in the file, if it is known.
    """
    from agentenv.runs.store.codec import encode_line  # an evaluation in memory encodes nothing

    line = encode_line(trajectory)
    return Encoded(line, summarize(trajectory, offset=offset, size=len(line)))
