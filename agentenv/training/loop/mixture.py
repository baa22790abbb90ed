"""Choose the tasks that a training plays: environments are drawn by weight, tasks in shuffled rounds.

Each round of an environment contains all its tasks once, so a task repeats only after all others. A cursor
per environment counts used tasks. Where batches are played one after another, it advances only once a batch
was trained, so a resumed run plays the tasks of an unfinished batch again. A stream instead keeps a list of
the groups that were dealt and not trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import isfinite
from random import Random
from typing import Any, NamedTuple, Self, TypeAlias, cast

from agentenv.core.episode_env import Task, derive_seed
from agentenv.core.errors import UsageError
from agentenv.envs.advice import tell_if_alike
from agentenv.envs.registry import spec as find_spec
from agentenv.envs.spec import EnvSpec
from agentenv.envs.tasks import TaskSet

__all__ = ["DealtGroup", "DealtTask", "Envs", "Mixture", "TaskPosition", "weighted"]

Envs: TypeAlias = str | EnvSpec | Mapping[str, float] | Sequence[str | EnvSpec | tuple[str | EnvSpec, float]]
"""An environment id, an `EnvSpec`, a mapping of ids to weights, or a list of these or of
`(environment, weight)` pairs."""


class DealtTask(NamedTuple):
    """A task that was dealt for a group."""

    owner: int
    """Index of its environment in `Mixture.specs`."""
    task: Task
    cursor: int
    """Index of the task in the environment's rounds; `Mixture.task_at` finds it again."""
    repeat: int
    """Number of times that the task came before in this deal. It is counted over all processes, and over
    entries that share an environment, so that each time has an id and seeds of its own."""


class Mixture:
    """Environments with their weights and tasks.

    Args:
        envs: the environments.
        tasks: tasks to train on, or a mapping of environment id to tasks; None, and an environment that the
            mapping does not name, mean the spec's tasks.
        eval_tasks: tasks to evaluate on, or such a mapping; None means the split `test` of the spec's
            tasks, if it exists.

    Raises:
        UsageError: There is no environment, a weight is not positive, or tasks are given for an environment
            that is not played.
    """

    def __init__(self, envs: Envs, *, tasks: Any = None, eval_tasks: Any = None) -> None:
        pairs = weighted(envs)
        if not pairs:
            raise UsageError("there is no environment to play", remedy="name at least one")
        self.specs = tuple(find_spec(env) for env, _ in pairs)
        self.weights = tuple(weight for _, weight in pairs)
        ids = [entry.id for entry in self.specs]
        self.names = tuple(
            name if name not in ids[:index] else f"{name} ({ids[:index].count(name) + 1})"
            for index, name in enumerate(ids)
        )
        """Names of the entries in the cursors: the ids, with a number where an environment comes again."""
        # Made once, because a generator of tasks can be read only once.
        self._tasks, self._eval_tasks = _by_environment(tasks, ids), _by_environment(eval_tasks, ids)
        for entry in self.specs:
            if entry.id not in self._tasks:
                tell_if_alike(entry.id, entry.task_set())

    def tasks_of(self, entry: EnvSpec) -> TaskSet:
        """Return the tasks to train on."""
        given = self._tasks.get(entry.id)
        return entry.task_set() if given is None else given

    def held_out(self, entry: EnvSpec) -> TaskSet | None:
        """Return the tasks to evaluate on: the user's, else the held-out split; None if there are none."""
        given = self._eval_tasks.get(entry.id)
        if given is not None:
            return given
        tasks = entry.task_set()
        return tasks.split(tasks.held_out) if tasks.held_out else None

    def deal(
        self, count: int, *, seed: int, round_index: int, cursors: Mapping[str, int]
    ) -> tuple[list[DealtTask], dict[str, int]]:
        """Return the next tasks, those of an environment side by side, and the cursors after them.

        Args:
            count: number of tasks, over all environments and all processes.
            seed: seed of the run.
            round_index: index of the round; each round draws again how many tasks an environment gets.
            cursors: number of tasks taken so far, by the names in `names`.
        """
        random = Random(derive_seed(seed, "mixture", round_index))
        drawn = random.choices(range(len(self.specs)), self.weights, k=count)
        after = dict(cursors)
        dealt: list[DealtTask] = []
        times_seen: Counter[tuple[str, str]] = Counter()
        for index, entry in enumerate(self.specs):
            if index not in drawn:
                continue
            name, number = self.names[index], drawn.count(index)
            start = cursors.get(name, 0)
            for cursor, task in enumerate(islice(self.rounds(entry, seed, start), number), start):
                dealt.append(DealtTask(index, task, cursor, times_seen[entry.id, task.id]))
                times_seen[entry.id, task.id] += 1
            after[name] = start + number
        return dealt, after

    def task_at(self, owner: int, *, seed: int, cursor: int) -> Task:
        """Return the task with this index in the rounds of an environment, as `deal` dealt it."""
        return next(self.rounds(self.specs[owner], seed, cursor))

    def rounds(self, entry: EnvSpec, seed: int, cursor: int) -> Iterator[Task]:
        """Yield an environment's tasks, from index `cursor` of the endless sequence of shuffled rounds.

        Raises:
            UsageError: The environment has no tasks.
        """
        tasks = self.tasks_of(entry)
        size = tasks.num_shuffled
        if size is None:
            yield from tasks.shuffle(seed, start=cursor)
            return
        if not size:
            raise UsageError(f"split {tasks.split_name!r} has no tasks to train on")
        number, start = divmod(cursor, size)
        while True:
            yield from tasks.shuffle(derive_seed(seed, "tasks", number), start=start)
            number, start = number + 1, 0


def weighted(envs: Envs) -> list[tuple[str | EnvSpec, float]]:
    """Return pairs of environment and weight, for any form of `Envs`.

    Raises:
        UsageError: A weight is not positive.
    """
    if isinstance(envs, (str, EnvSpec, type)) or not isinstance(cast("object", envs), Iterable):
        return [(cast("str | EnvSpec", envs), 1.0)]
    given = envs.items() if isinstance(envs, Mapping) else envs
    pairs = [entry if isinstance(entry, tuple) else (entry, 1.0) for entry in given]
    for name, weight in pairs:
        if not isfinite(weight) or weight <= 0:
            raise UsageError(f"the weight of {name} must be more than 0, not {weight}")
    return [(env, float(weight)) for env, weight in pairs]


def _by_environment(given: Any, ids: Sequence[str]) -> dict[str, TaskSet]:
    """Return the given task set of each environment that has one, by environment id."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not any(name in given for name in ids):
        return dict.fromkeys(ids, _readable(given))
    by_id = cast("Mapping[str, Any]", given)
    unknown = [name for name in by_id if name not in ids]
    if unknown:
        raise UsageError(
            f"tasks are given for {unknown[0]!r}, which is not played",
            remedy=f"the environments of this training are {', '.join(ids)}",
        )
    return {name: _readable(tasks) for name, tasks in by_id.items()}


def _readable(given: Any) -> TaskSet:
    """Return a user's tasks, of which the first one can be read."""
    tasks = TaskSet.of(given)
    next(iter(tasks), None)
    return tasks


@dataclass(frozen=True, slots=True)
class DealtGroup:
    """A group that was dealt and not trained; it can be dealt again with the same task, id and seeds."""

    env: str
    """Name of its environment in the mixture."""
    cursor: int
    """Index of its task in the rounds of the environment."""
    round_index: int
    """Round of the run, which the id and the seeds of the group depend on."""
    repeat: int
    """Number of times that the task came before in the round."""
    group_id: str


@dataclass(frozen=True, slots=True)
class TaskPosition:
    """The tasks that a training has used. Dealing goes on from here, with nothing lost and nothing twice."""

    cursors: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of tasks taken so far, by environment."""
    rounds: int = 0
    """Number of rounds that were dealt, so that no later one has the same number."""
    untrained: tuple[DealtGroup, ...] = ()
    """Groups of a stream that were dealt and not trained, in the order in which they were dealt."""

    def record(self) -> dict[str, Any]:
        """Return the position as JSON values, for a checkpoint."""
        return {
            "cursors": dict(self.cursors),
            "rounds": self.rounds,
            "untrained": [asdict(group) for group in self.untrained],
        }

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> Self:
        """Return the position that `record` wrote into a checkpoint."""
        untrained = tuple(DealtGroup(**group) for group in record.get("untrained", ()))
        return cls(dict(record["cursors"]), record.get("rounds", 0), untrained)
