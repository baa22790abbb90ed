"""What will be played: the group of each task with its seeds, and the plan of each of its episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from agentenv.core.episode_env import ENV_SEEDS, EpisodeEnv, Task, TaskFields, derive_seed
from agentenv.core.errors import UsageError
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.trajectory import Trajectory
from agentenv.engine.interface import Sampling

__all__ = ["Branch", "Job", "Plan", "Rules", "Score", "TaskLike", "branches_of", "jobs_of", "read_task"]

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
class Rules:
    """What all episodes of a stage have in common."""

    env_id: str
    limits: RunLimits = field(default_factory=RunLimits)
    sampling: Sampling = field(default_factory=Sampling)
    done_policy: DonePolicy = "stop"
    score: Score | None = None
    """Adds a reward to the environment's own."""


@dataclass(frozen=True, slots=True)
class Job:
    """One group to play: a task and the seeds of its episodes."""

    task_id: str
    task: Mapping[str, object]
    run_seed: int
    """Seed from which the sampling seeds derive, with the environment, the task, the member and the turn."""
    group_id: str
    seed: int
    """Seed of the environment; all members of the group share it."""
    branch: Branch | None = None
    """Recorded turns with which every member begins; None to play all turns."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that determines one episode; the same plan gives the same episode."""

    rules: Rules
    job: Job
    member: int = 0

    @property
    def name(self) -> str:
        """Group and member of the episode."""
        return f"{self.job.group_id}/{self.member}"

    def seed_of(self, turn: int) -> int:
        """Return the sampling seed of a turn."""
        job = self.job
        return derive_seed(job.run_seed, self.rules.env_id, job.task_id, self.member, turn)


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
        yield Job(task_id, data, salted, group_id, derive_seed(salted, env_id, task_id) % ENV_SEEDS)


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
