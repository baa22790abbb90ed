"""Which tasks a training plays: dealt from each environment's set, environments drawn by their weights.

Tasks are dealt from a shuffled round of each environment's set, so that each is met once before any
is met again. A cursor for each environment counts the tasks that were used; it advances only once a
batch was trained, so a resumed run deals the rest again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from random import Random
from typing import Any, TypeAlias

from agentenv.core.errors import UsageError
from agentenv.core.seeds import derive_seed
from agentenv.core.task import Task
from agentenv.envs.registry import spec as find_spec
from agentenv.envs.spec import EnvSpec
from agentenv.envs.tasks import TaskSet

__all__ = ["Dealt", "Envs", "Mixture", "weighted"]

Envs: TypeAlias = str | EnvSpec | Mapping[str, float] | Sequence[str | EnvSpec | tuple[str | EnvSpec, float]]
"""An environment id, an `EnvSpec`, a mapping of ids to weights, or a list of these or of
`(environment, weight)` pairs."""

Dealt: TypeAlias = list[tuple[int, Task]]
"""Tasks with the place of their environment in `Mixture.specs`, those of one environment together."""


class Mixture:
    """Environments with their weights and tasks.

    Args:
        envs: the environments.
        tasks: to train on; those of the spec if None. A mapping of environment id to tasks serves several.
        eval_tasks: to evaluate on; the split `test` of the spec's tasks, if there is one, if None.

    Raises:
        UsageError: There is no environment, or a weight is not positive.
    """

    def __init__(self, envs: Envs, *, tasks: Any = None, eval_tasks: Any = None) -> None:
        pairs = weighted(envs)
        if not pairs:
            raise UsageError("no environment to play: name at least one")
        self.specs = tuple(find_spec(one) if isinstance(one, str) else one for one, _ in pairs)
        self.weights = tuple(weight for _, weight in pairs)
        self._tasks, self._eval_tasks = tasks, eval_tasks

    def tasks_of(self, entry: EnvSpec) -> TaskSet:
        """Return the tasks to train on."""
        return entry.task_set() if self._tasks is None else _tasks_for(self._tasks, entry)

    def held_out(self, entry: EnvSpec) -> TaskSet | None:
        """Return the tasks to evaluate on: those given, else the split `test`; None if there are none."""
        if self._eval_tasks is not None:
            return _tasks_for(self._eval_tasks, entry)
        tasks = entry.task_set()
        return tasks.split("test") if "test" in tasks.splits else None

    def deal(
        self,
        count: int,
        *,
        seed: int,
        round_index: int,
        cursors: Mapping[str, int],
        left_out: Collection[tuple[str, str]],
    ) -> tuple[Dealt, dict[str, int]]:
        """Return the next tasks, and the cursors behind them.

        Args:
            count: tasks of all environments together, for all processes.
            seed: of the run.
            round_index: of the run; how many each environment gets is drawn anew in each round.
            cursors: tasks taken so far, by environment.
            left_out: environment and id of tasks that are passed over.
        """
        random = Random(derive_seed(seed, "mixture", round_index))
        drawn = random.choices(range(len(self.specs)), self.weights, k=count)
        after = dict(cursors)
        dealt: Dealt = []
        for index, entry in enumerate(self.specs):
            if index not in drawn:
                continue
            cursor = cursors.get(entry.id, 0)
            chosen: list[Task] = []
            for task in self.rounds(entry, seed, cursor):
                cursor += 1
                if (entry.id, task.id) not in left_out:
                    chosen.append(task)
                if len(chosen) == drawn.count(index):
                    break
            after[entry.id] = cursor
            dealt += [(index, task) for task in chosen]
        return dealt, after

    def rounds(self, entry: EnvSpec, seed: int, cursor: int) -> Iterator[Task]:
        """Yield an environment's tasks from a place in the endless sequence of shuffled rounds.

        Raises:
            UsageError: There are none.
        """
        tasks = self.tasks_of(entry)
        if tasks.endless:
            yield from islice(tasks.shuffle(seed), cursor, None)
            return
        size = len(tasks)
        if not size:
            raise UsageError(f"split {tasks.split_name!r} has no tasks to train on")
        number, start = divmod(cursor, size)
        while True:
            yield from islice(tasks.shuffle(derive_seed(seed, "tasks", number)), start, None)
            number, start = number + 1, 0


def weighted(envs: Envs) -> list[tuple[str | EnvSpec, float]]:
    """Return environments with their weights, however they are given.

    Raises:
        UsageError: A weight is not positive.
    """
    if isinstance(envs, (str, EnvSpec)):
        return [(envs, 1.0)]
    given = envs.items() if isinstance(envs, Mapping) else envs
    pairs = [one if isinstance(one, tuple) else (one, 1.0) for one in given]
    for name, weight in pairs:
        if not isfinite(weight) or weight <= 0:
            raise UsageError(f"the weight of {name} must be more than 0, not {weight}")
    return [(one, float(weight)) for one, weight in pairs]


def _tasks_for(given: Any, entry: EnvSpec) -> TaskSet:
    """Return the tasks of one environment; a mapping of environment id to tasks serves several."""
    if isinstance(given, Mapping) and entry.id in given:
        return TaskSet.of(given[entry.id])
    return TaskSet.of(given)
