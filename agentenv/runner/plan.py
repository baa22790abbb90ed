"""What to play: tasks with their ids, the groups made of them with their seeds, an episode's plan."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from agentenv.core.episode_env import EpisodeEnv
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.seeds import derive_seed
from agentenv.core.task import Task, TaskFields
from agentenv.core.trajectory import Trajectory
from agentenv.engine.base import Sampling

__all__ = ["Job", "Plan", "Score", "TaskLike", "jobs_of", "read_task"]

Score: TypeAlias = Callable[
    [Trajectory, EpisodeEnv, Mapping[str, object]],
    Awaitable[tuple[float | None, Mapping[str, float | None]]],
]
"""Scores a draft (the record without reward fields): the reward to add, and its named parts."""


class _TaskRow(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def data(self) -> Mapping[str, object]: ...


TaskLike: TypeAlias = "_TaskRow | Mapping[str, object]"
"""A task with `id` and `data`, or the data alone (its id is then a digest of it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one episode plays; the same plan gives the same episode."""

    env_id: str
    task_id: str = ""
    task: Mapping[str, object] = field(default_factory=dict[str, object])
    seed: int = 0
    """Of the environment; shared by a group."""
    group_id: str = ""
    member: int = 0
    run_seed: int = 0
    """Sampling seeds derive from it, the environment's id, the task's, member and turn."""
    limits: RunLimits = field(default_factory=RunLimits)
    sampling: Sampling = field(default_factory=Sampling)
    done_policy: DonePolicy = "stop"
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One group to play."""

    task_id: str
    task: Mapping[str, object]
    run_seed: int
    """Of sampling."""
    group_id: str
    seed: int
    """Of the environment."""

    def plan(self, template: Plan, member: int) -> Plan:
        """Return what one member of the group plays."""
        return replace(
            template,
            task_id=self.task_id,
            task=self.task,
            seed=self.seed,
            group_id=self.group_id,
            member=member,
            run_seed=self.run_seed,
        )


def read_task(task: TaskLike) -> tuple[str, Mapping[str, object]]:
    """Return a task's id and fields; a bare mapping gets the id that a task set would give it."""
    if not isinstance(task, Mapping) or isinstance(task, TaskFields):
        return task.id, task if isinstance(task, TaskFields) else task.data
    first = Task.of(task)
    return first.id, first.data


def jobs_of(tasks: Iterable[TaskLike], env_id: str, run_seed: int, round_index: int) -> Iterator[Job]:
    """Give every group its id and seeds; a task met again in one call is another group."""
    met: dict[str, int] = {}
    if round_index:
        run_seed = derive_seed(run_seed, "round", round_index)
    for task in tasks:
        task_id, data = read_task(task)
        repeat = met.get(task_id, 0)
        met[task_id] = repeat + 1
        salted = run_seed if repeat == 0 else derive_seed(run_seed, "repeat", repeat)
        suffix = (f"@{round_index}" if round_index else "") + (f"~{repeat}" if repeat else "")
        group_id = f"{env_id}:{task_id}{suffix}"
        yield Job(task_id, data, salted, group_id, derive_seed(salted, env_id, task_id))
