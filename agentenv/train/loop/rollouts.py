"""What the loop trains on: tasks dealt from each environment's set, played in groups.

Tasks are dealt from a shuffled round of each environment's set, so that each is met once before any
is met again. Where the dealing stands is a cursor for each environment, which travels with the batch:
only a batch that was trained moves the trainer's own cursors, so a resumed run deals the rest again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, isfinite
from random import Random
from typing import TYPE_CHECKING, Any

from agentenv.core.errors import UsageError
from agentenv.core.seeds import derive_seed
from agentenv.core.task import Task
from agentenv.core.trajectory import TrajectoryGroup
from agentenv.engine.base import Sampling
from agentenv.envs.registry import EnvSpec
from agentenv.envs.registry import spec as find_spec
from agentenv.envs.tasks import TaskSet
from agentenv.runner.runner import Runner
from agentenv.runs.stats import clustered_mean
from agentenv.train.loop.prompts import too_long
from agentenv.train.loop.sync import follow_trainer, sampling_engine

if TYPE_CHECKING:
    from agentenv.train.trainer import GRPOTrainer

__all__ = ["Played", "Rollouts"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Played:
    """The episodes of one step."""

    groups: tuple[TrajectoryGroup, ...]
    cursors: Mapping[str, int]
    """Tasks taken so far, by environment, these included."""
    seconds: float
    """From the first episode to the last."""


class Rollouts:
    """Plays the trainer's environments with its engine.

    Raises:
        UsageError: There is no environment, or a weight is not positive.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self.specs = _weighted_specs(trainer.envs)
        self.left_out: frozenset[tuple[str, str]] = frozenset()
        """Environment and id of tasks whose prompt is too long."""
        config = trainer.config
        adapter = trainer.model.active_adapter if hasattr(trainer.model, "peft_config") else None
        self.sampling = Sampling(temperature=config.temperature, adapter=adapter)
        self.runner = Runner(
            sampling_engine(trainer),
            trainer.renderer,
            trainer.limits,
            options=trainer.runner_options,
            sampling=self.sampling,
            run_seed=config.seed,
        )
        self._synced_version: int | None = None

    async def sync(self) -> dict[str, float]:
        """Bring the trainer's weights to the engine, unless it has them; return metrics of the check."""
        if self._synced_version == self.trainer.weights_version:
            return {}
        metrics = await follow_trainer(self.trainer)
        self._synced_version = self.trainer.weights_version
        return metrics

    def tasks_of(self, entry: EnvSpec) -> TaskSet:
        """Return the tasks to train on."""
        given = self.trainer.tasks
        return entry.task_set() if given is None else _tasks_for(given, entry)

    def held_out(self, entry: EnvSpec) -> TaskSet | None:
        """Return the tasks to evaluate on: those given, else the split `test`; None if there are none."""
        given = self.trainer.eval_tasks
        if given is not None:
            return _tasks_for(given, entry)
        tasks = entry.task_set()
        return tasks.split("test") if "test" in tasks.splits else None

    # Playing ------------------------------------------------------------------------------

    async def play(self, step: int, cursors: Mapping[str, int]) -> Played:
        """Play the groups of one step, from a place in the tasks on."""
        config = self.trainer.config
        return await self._round(step * (1 + config.refill_rounds) + 1, config.groups_per_step, cursors)

    async def refill(self, step: int, played: Played) -> Played:
        """Play further tasks until enough groups have a gradient, or the rounds are used up.

        Which groups have one is settled between the ranks, so this must not run beside an update.
        """
        config = self.trainer.config
        first = step * (1 + config.refill_rounds) + 1
        for attempt in range(1, 1 + config.refill_rounds):
            wanted = config.groups_per_step - self.trainer.count_mixed(played.groups)
            if wanted <= 0:
                break
            more = await self._round(first + attempt, wanted, played.cursors)
            groups = (*played.groups, *more.groups)
            played = Played(groups, more.cursors, played.seconds + more.seconds)
        return played

    async def _round(self, number: int, wanted: int, cursors: Mapping[str, int]) -> Played:
        began = time.perf_counter()
        random = Random(derive_seed(self.trainer.config.seed, "mixture", number))
        drawn = random.choices(range(len(self.specs)), [weight for _, weight in self.specs], k=wanted)
        after = dict(cursors)
        dealt: list[tuple[int, Task]] = []
        for index, (entry, _) in enumerate(self.specs):
            if index in drawn:
                tasks, after[entry.id] = self._deal(entry, drawn.count(index), cursors.get(entry.id, 0))
                dealt += [(index, task) for task in tasks]
        # Over all environments together: the odd tasks of each would otherwise be the first rank's.
        mine = dealt[self.trainer.world.rank :: self.trainer.world.size]
        parts = [
            (entry, [task for owner, task in mine if owner == index])
            for index, (entry, _) in enumerate(self.specs)
        ]
        played = await asyncio.gather(*(self._play(entry, tasks, number) for entry, tasks in parts if tasks))
        groups = tuple(group for groups in played for group in groups)
        return Played(groups, after, time.perf_counter() - began)

    async def _play(self, entry: EnvSpec, tasks: Sequence[Task], number: int) -> list[TrajectoryGroup]:
        size = self.trainer.config.num_generations
        played = self.runner.run_groups(
            entry, tasks, size, round_index=number, on_trajectory=self.trainer.on_trajectory
        )
        # In an order that does not depend on which episode was quick.
        return sorted([group async for group in played], key=lambda group: group.group_id)

    def _deal(self, entry: EnvSpec, count: int, cursor: int) -> tuple[list[Task], int]:
        """Return the next tasks of all ranks, and the cursor behind them."""
        chosen: list[Task] = []
        for task in _rounds(self.tasks_of(entry), self.trainer.config.seed, cursor):
            cursor += 1
            if (entry.id, task.id) not in self.left_out:
                chosen.append(task)
            if len(chosen) == count:
                break
        return chosen, cursor

    # Before and after ---------------------------------------------------------------------

    async def leave_out_long_prompts(self) -> dict[str, float]:
        """Leave out tasks whose first prompt has no room, of those that the rest of the run will meet.

        Returns:
            `tasks/checked` and `tasks/too_long`, for each environment if there are several.

        Raises:
            UsageError: No task of an environment is left.
        """
        counts: dict[str, float] = {}
        for entry, weight in self.specs:
            tasks = self._upcoming(entry, weight / sum(weight for _, weight in self.specs))
            mine = tasks[self.trainer.world.rank :: self.trainer.world.size]
            found = self.trainer.world.gather(await too_long(self.runner, entry, mine, self.trainer.config))
            prefix = "tasks" if len(self.specs) == 1 else f"tasks/{entry.id}"
            counts |= {f"{prefix}/checked": float(len(tasks)), f"{prefix}/too_long": float(len(found))}
            if not found:
                continue
            if len(found) == len(tasks):
                shortest = min(one.num_tokens for one in found)
                raise UsageError(
                    f"every prompt of {entry.id} is too long: the shortest of {len(tasks)} has {shortest} "
                    f"tokens, the limit is {found[0].limit}; raise max_context_tokens or max_prompt_length"
                )
            self.left_out |= {(entry.id, one.task_id) for one in found}
            log.warning(
                "%s: %d of %d tasks are left out, their prompt is over %d tokens",
                *(entry.id, len(found), len(tasks), found[0].limit),
            )
        return counts

    def _upcoming(self, entry: EnvSpec, share: float) -> list[Task]:
        """Return the different tasks that an environment will be asked for, about."""
        config = self.trainer.config
        rounds = (config.max_steps - self.trainer.steps_done) * (1 + config.refill_rounds)
        wanted = ceil(max(0, rounds) * config.groups_per_step * share)
        tasks = self.tasks_of(entry)
        if tasks.num_tasks is not None:
            wanted = min(wanted, tasks.num_tasks)
        cursor = self.trainer.cursors.get(entry.id, 0)
        upcoming = islice(_rounds(tasks, config.seed, cursor), wanted)
        return list({task.id: task for task in upcoming}.values())

    async def evaluate(self) -> dict[str, float]:
        """Play the held-out tasks greedily, each once; see `GRPOTrainer.evaluate`."""
        await self.sync()
        metrics: dict[str, float] = {}
        for entry, _ in self.specs:
            tasks = self.held_out(entry)
            if tasks is None:
                continue
            limit = self.trainer.config.eval_tasks
            if tasks.endless and not limit:
                log.warning("%s is not evaluated: its held-out tasks never end; set eval_tasks", entry.id)
                continue
            chosen = list(tasks.take(limit) if limit else tasks)
            mine = chosen[self.trainer.world.rank :: self.trainer.world.size]
            prefix = "eval" if len(self.specs) == 1 else f"eval/{entry.id}"
            played = self.runner.run_groups(entry, mine, 1, sampling=replace(self.sampling, temperature=0.0))
            rewards = [one.reward async for group in played for one in group]
            metrics |= {
                f"{prefix}/{name}": value
                for name, value in _scores(self.trainer.world.gather(rewards)).items()
            }
        return metrics


def _scores(rewards: Sequence[float | None]) -> dict[str, float]:
    known = [reward for reward in rewards if reward is not None]
    if not known:
        return {"tasks": float(len(rewards)), "unscored": float(len(rewards))}
    passed = {str(number): [float(reward >= 1.0)] for number, reward in enumerate(known)}
    interval = clustered_mean(passed)
    return {
        "success": interval.mean,
        "success_low": interval.low,
        "success_high": interval.high,
        "reward": sum(known) / len(known),
        "tasks": float(len(rewards)),
        "unscored": float(len(rewards) - len(known)),
    }


def _weighted_specs(envs: Any) -> list[tuple[EnvSpec, float]]:
    if envs is None:
        raise UsageError("no environment to play: pass envs= to GRPOTrainer")
    pairs: list[tuple[Any, float]]
    if isinstance(envs, Mapping):
        pairs = list(envs.items())
    elif isinstance(envs, (str, EnvSpec)):
        pairs = [(envs, 1.0)]
    else:
        pairs = [one if isinstance(one, tuple) else (one, 1.0) for one in envs]
    for name, weight in pairs:
        if not isfinite(weight) or weight <= 0:
            raise UsageError(f"the weight of {name} must be more than 0, not {weight}")
    return [(find_spec(one) if isinstance(one, str) else one, float(weight)) for one, weight in pairs]


def _tasks_for(given: Any, entry: EnvSpec) -> TaskSet:
    """Return the tasks of one environment; a mapping of environment id to tasks serves several."""
    if isinstance(given, Mapping) and entry.id in given:
        return TaskSet.of(given[entry.id])
    return TaskSet.of(given)


def _rounds(tasks: TaskSet, seed: int, cursor: int) -> Iterator[Task]:
    """Yield tasks from a place in the endless sequence of shuffled rounds."""
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
