"""What to play: task ids, the group of each task with its seeds, and the plan of each episode."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Literal, Protocol, TypeAlias, cast

from agentenv.core.episode_env import EpisodeEnv, Outcome, Task, TaskFields, derive_seed
from agentenv.core.errors import UsageError
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.messages import JsonValue, Message, ToolResult
from agentenv.core.trajectory import EpisodeError, StopReason, Trajectory, Turn
from agentenv.engine.base import Sampling
from agentenv.runner.conversation.base import Recorded, Reply

__all__ = [
    "Branch",
    "Job",
    "OpenTurn",
    "Plan",
    "Record",
    "Score",
    "TaskLike",
    "branches_of",
    "jobs_of",
    "read_task",
]

Score: TypeAlias = Callable[
    [Trajectory, EpisodeEnv, Mapping[str, object]],
    Awaitable[tuple[float | None, Mapping[str, float | None]]],
]
"""Scores a draft, which is the record without rewards; returns the reward to add and its named parts."""


class _TaskRow(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def data(self) -> Mapping[str, object]: ...


TaskLike: TypeAlias = "_TaskRow | Mapping[str, object]"
"""A task with `id` and `data`, or only its data; the id is then a digest of the data."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The recorded turns with which an episode begins; the model goes on after them.

    The environment really plays these turns again and must answer as it did. Their tokens are not trained on.
    """

    record: Trajectory
    turns: int
    """Number of recorded turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that determines one episode; the same plan gives the same episode."""

    env_id: str
    task_id: str = ""
    task: Mapping[str, object] = field(default_factory=dict[str, object])
    seed: int = 0
    """Seed of the environment; all members of a group share it."""
    group_id: str = ""
    member: int = 0
    run_seed: int = 0
    """Seed of the run. Sampling seeds derive from it, the environment, the task, the member and the turn."""
    limits: RunLimits = field(default_factory=RunLimits)
    sampling: Sampling = field(default_factory=Sampling)
    done_policy: DonePolicy = "stop"
    score: Score | None = None
    branch: Branch | None = None
    """Recorded turns with which the episode begins; None to play all turns."""


@dataclass(frozen=True, slots=True)
class Job:
    """One group to play."""

    task_id: str
    task: Mapping[str, object]
    run_seed: int
    """Seed from which the sampling seeds derive."""
    group_id: str
    seed: int
    """Seed of the environment."""
    branch: Branch | None = None
    """Recorded turns with which every member begins; None to play all turns."""

    def plan(self, template: Plan, member: int) -> Plan:
        """Return the plan of one member of the group."""
        return replace(
            template,
            task_id=self.task_id,
            task=self.task,
            seed=self.seed,
            group_id=self.group_id,
            member=member,
            run_seed=self.run_seed,
            branch=self.branch,
        )


def read_task(task: TaskLike) -> tuple[str, Mapping[str, object]]:
    """Return a task's id and fields; a plain mapping gets the id that a task set would give it."""
    if not isinstance(task, Mapping) or isinstance(task, TaskFields):
        return task.id, task if isinstance(task, TaskFields) else task.data
    whole = Task.of(task)
    return whole.id, whole.data


def jobs_of(
    tasks: Iterable[TaskLike],
    env_id: str,
    run_seed: int,
    round_index: int,
    repeats: Iterable[int] | None = None,
) -> Iterator[Job]:
    """Yield a job for each task, with the group's id and seeds; a repeated task becomes another group.

    `repeats` holds how often each task came before in the round; without it they are counted over `tasks`.
    """
    if round_index:
        run_seed = derive_seed(run_seed, "round", round_index)
    counted = _counted(tasks) if repeats is None else zip(tasks, repeats, strict=True)
    for task, repeat in counted:
        task_id, data = read_task(task)
        salted = run_seed if repeat == 0 else derive_seed(run_seed, "repeat", repeat)
        suffix = (f"@{round_index}" if round_index else "") + (f"~{repeat}" if repeat else "")
        group_id = f"{env_id}:{task_id}{suffix}"
        yield Job(task_id, data, salted, group_id, derive_seed(salted, env_id, task_id))


def branches_of(records: Iterable[Trajectory], from_turn: int, run_seed: int) -> Iterator[Job]:
    """Yield a job for each record, whose members go on from this turn with sampling seeds of their own.

    Raises:
        UsageError: An episode has no such turn.
    """
    for record in records:
        if not 0 <= from_turn < len(record.turns):
            raise UsageError(
                f"member {record.member} of {record.group_id} has {len(record.turns)} turns, so it cannot be "
                f"branched at turn {from_turn}",
                remedy="name a turn from 0 to the one before its last",
            )
        salted = derive_seed(run_seed, "branch", record.group_id, record.member, from_turn)
        group_id = f"{record.group_id}/{record.member}@turn-{from_turn}"
        yield Job(record.task_id, record.task, salted, group_id, record.seed, Branch(record, from_turn))


def _counted(tasks: Iterable[TaskLike]) -> Iterator[tuple[TaskLike, int]]:
    """Yield each task with the number of times that it came before."""
    times_seen: Counter[str] = Counter()
    for task in tasks:
        task_id, _ = read_task(task)
        yield task, times_seen[task_id]
        times_seen[task_id] += 1


_TIMES = ("generate_s", "queue_s", "env_s", "tools_s", "user_s", "render_s")


@dataclass(slots=True)
class OpenTurn:
    """A turn while it is being played."""

    index: int
    reply: Reply
    sampling: Sampling
    results: tuple[ToolResult, ...] = ()
    reward: float = 0.0
    timings: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_TIMES, 0.0))
    attempt: int = 0

    def close(self, reward: float) -> Turn:
        """Return the finished turn with its reward."""
        reply = self.reply
        return Turn(
            index=self.index,
            message=reply.message,
            finish_reason=cast("Literal['stop', 'length']", reply.finish_reason),
            num_tokens=reply.num_tokens,
            sequence=reply.sequence,
            start=reply.start,
            tool_calls=reply.tool_calls,
            tool_results=self.results,
            reward=reward,
            sampling=self.sampling.record(),
            timings=self.timings,
            attempt=self.attempt,
        )


@dataclass(slots=True)
class Record:
    """The data of one attempt; every attempt has its own."""

    plan: Plan
    conversation: Recorded
    attempt: int = 0
    started: float = field(default_factory=time.perf_counter)
    turns: list[OpenTurn] = field(default_factory=list[OpenTurn])
    messages: list[Message] = field(default_factory=list[Message])
    tools: tuple[Mapping[str, JsonValue], ...] = ()
    sampled_tokens: int = 0
    parse_errors: int = 0
    repaired_calls: int = 0
    tool_calls: int = 0
    """Number of tool calls that were run."""
    user_turns: int = 0
    condenser_tokens: int = 0
    """Tokens that a summariser sampled; `sampled_tokens` includes them."""
    trimmed: int = 0
    """Number of tool results and messages that were cut."""
    spare: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*_TIMES, "reward_s"), 0.0))
    """Seconds spent outside turns, at the start and for the reward."""

    @property
    def name(self) -> str:
        """Name of the attempt; it is the same each time the episode is played."""
        return f"{self.plan.group_id}/{self.plan.member}/{self.attempt}"

    @property
    def answered(self) -> bool:
        """Whether the model answered a request in this attempt."""
        return len(self.turns) > (0 if self.plan.branch is None else self.plan.branch.turns)

    def give(self, index: int, reward: float) -> None:
        """Add a user's reward to the reward of a turn.

        Raises:
            UsageError: The reward is not finite, or no such turn was played.
        """
        if not isfinite(reward):
            raise UsageError(
                f"the user gave turn {index} the reward {reward!r}", remedy="the reward must be finite"
            )
        if not 0 <= index < len(self.turns):
            raise UsageError(
                f"the user rewarded turn {index}, but turns 0 to {len(self.turns) - 1} were played"
            )
        self.turns[index].reward += reward

    def freeze(
        self, reason: StopReason, *, outcome: Outcome | None = None, error: EpisodeError | None = None
    ) -> Trajectory:
        """Return the trajectory; without an outcome it is the draft that rewards see."""
        turn_rewards = [turn.reward if outcome is not None else 0.0 for turn in self.turns]
        reward = None if outcome is None else outcome.reward
        if reward is not None and turn_rewards:
            # The outcome belongs to the last turn, so that the turns' rewards sum to the episode's reward.
            turn_rewards[-1] += reward
            reward = sum(turn_rewards)
        turns = tuple(turn.close(share) for turn, share in zip(self.turns, turn_rewards, strict=True))
        return replace(
            self._without_turns(reason, error),
            turns=turns,
            sequences=self.conversation.sequences,
            messages=tuple(self.messages),
            reward=reward,
            rewards=dict(outcome.rewards) if outcome is not None else {},
            tools=self.tools,
            rewrites=tuple(self.conversation.rewrites),
            metrics=self._metrics(turns),
            timings=self._timings(turns),
        )

    def freeze_failed(self, reason: StopReason, error: EpisodeError) -> Trajectory:
        """Return the record of a failed attempt; without its turns, if what was recorded is inconsistent."""
        try:
            return self.freeze(reason, error=error)
        except Exception:  # noqa: BLE001 - values of outside code are in the record, and the episode must not be lost
            return self._without_turns(reason, error)

    def _without_turns(self, reason: StopReason, error: EpisodeError | None) -> Trajectory:
        plan = self.plan
        return Trajectory(
            env_id=plan.env_id,
            task_id=plan.task_id,
            seed=plan.seed,
            group_id=plan.group_id,
            stop_reason=reason,
            member=plan.member,
            attempt=self.attempt,
            branch_of=None if plan.branch is None else plan.branch.record.member,
            shared_turns=0 if plan.branch is None else plan.branch.turns,
            error=error,
            untrainable_reason=self._untrainable(error),
            task=cast("Mapping[str, JsonValue]", plan.task),
        )

    def _metrics(self, turns: tuple[Turn, ...]) -> dict[str, float]:
        return {
            "turns": float(len(turns)),
            "sampled_tokens": float(self.sampled_tokens),
            "tool_calls": float(self.tool_calls),
            "tool_errors": float(sum(result.is_error for turn in turns for result in turn.tool_results)),
            "parse_errors": float(self.parse_errors),
            "repaired_calls": float(self.repaired_calls),
            "user_turns": float(self.user_turns),
            "trimmed_outputs": float(self.trimmed),
            "condenser_tokens": float(self.condenser_tokens),
            **({} if self.plan.branch is None else {"shared_turns": float(self.plan.branch.turns)}),
            **{f"forks_{cause}": float(count) for cause, count in self.conversation.forks.items()},
            **self.conversation.usage,
        }

    def _timings(self, turns: tuple[Turn, ...]) -> dict[str, float]:
        summed = dict(self.spare)
        for turn in turns:
            for name, seconds in turn.timings.items():
                summed[name] += seconds
        summed["total_s"] = time.perf_counter() - self.started
        return summed

    def _untrainable(self, error: EpisodeError | None) -> str:
        if error is not None:
            return f"failed at {error.boundary}: {error.type}: {error.message}"
        if self.conversation.untrainable_reason:
            return self.conversation.untrainable_reason
        if not self.conversation.has_policy_tokens:
            return "no token was sampled by the policy"
        return self.plan.sampling.untrainable_reason
