"""The loop around the trainer: play, step, sync, evaluate, save, until the steps are done.

Every episode goes through the runner, with the seeds that it would have in an evaluation. Tasks are
dealt from a shuffled round of each environment's set, so that each is met once before any is met
again; the place in the round is part of a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import islice
from math import isfinite
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from agentenv.engine.base import Sampling
from agentenv.errors import UsageError
from agentenv.registry import EnvSpec
from agentenv.registry import spec as find_spec
from agentenv.runner import Runner
from agentenv.seeding import derive_seed
from agentenv.stats import clustered_mean
from agentenv.tasks import Task, TaskSet
from agentenv.train.metrics import MetricsFile
from agentenv.train.sync import sampling_engine, sync_engine
from agentenv.train.track import Trackers
from agentenv.train.warn import early_warnings
from agentenv.trajectory import TrajectoryGroup

if TYPE_CHECKING:
    from agentenv.train.grpo import GRPOTrainer

__all__ = ["Rollouts", "run_blocking", "train"]

log = logging.getLogger(__name__)
T = TypeVar("T")


class Rollouts:
    """Plays the trainer's environments with its engine.

    Raises:
        UsageError: There is no environment, or a weight is not positive.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self.specs = _weighted_specs(trainer.envs)
        config = trainer.config
        adapter = trainer.model.active_adapter if hasattr(trainer.model, "peft_config") else None
        self.sampling = Sampling(temperature=config.temperature, adapter=adapter)
        self.runner = Runner(
            sampling_engine(trainer),
            trainer.renderer,
            trainer.limits,
            sampling=self.sampling,
            run_seed=config.seed,
        )

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

    async def batch(self, step: int) -> list[TrajectoryGroup]:
        """Play the groups of one step; with refills, until enough of them have a gradient."""
        config = self.trainer.config
        groups: list[TrajectoryGroup] = []
        wanted = config.groups_per_step
        for attempt in range(1 + config.refill_rounds):
            groups += await self._round(step * (1 + config.refill_rounds) + attempt + 1, wanted)
            wanted = config.groups_per_step - self.trainer.count_mixed(groups)
            if wanted <= 0:
                break
        return groups

    async def _round(self, number: int, wanted: int) -> list[TrajectoryGroup]:
        random = Random(derive_seed(self.trainer.config.seed, "mixture", number))
        drawn = random.choices(range(len(self.specs)), [weight for _, weight in self.specs], k=wanted)
        parts = [
            self._play(entry, self._next_tasks(entry, drawn.count(index)), number)
            for index, (entry, _) in enumerate(self.specs)
            if index in drawn
        ]
        return [group for groups in await asyncio.gather(*parts) for group in groups]

    async def _play(self, entry: EnvSpec, tasks: Sequence[Task], number: int) -> list[TrajectoryGroup]:
        size = self.trainer.config.num_generations
        played = self.runner.run_groups(
            entry, tasks, size, round_index=number, on_trajectory=self.trainer.on_trajectory
        )
        # In an order that does not depend on which episode was quick.
        return sorted([group async for group in played], key=lambda group: group.group_id)

    def _next_tasks(self, entry: EnvSpec, count: int) -> list[Task]:
        cursor = self.trainer.cursors.get(entry.id, 0)
        self.trainer.cursors[entry.id] = cursor + count
        tasks = islice(_rounds(self.tasks_of(entry), self.trainer.config.seed, cursor), count)
        return list(tasks)[self.trainer.world.rank :: self.trainer.world.size]

    async def evaluate(self) -> dict[str, float]:
        """Play the held-out tasks greedily, each once; see `GRPOTrainer.evaluate`."""
        metrics: dict[str, float] = {}
        for entry, _ in self.specs:
            tasks = self.held_out(entry)
            if tasks is None:
                continue
            limit = self.trainer.config.eval_tasks
            chosen = tasks.take(limit) if limit or tasks.endless else list(tasks)
            prefix = "eval" if len(self.specs) == 1 else f"eval/{entry.id}"
            played = self.runner.run_groups(
                entry, chosen, 1, sampling=replace(self.sampling, temperature=0.0)
            )
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


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from synchronous code, also inside a running loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def train(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """Run the whole loop; see `GRPOTrainer.train`."""
    directory = Path(trainer.config.output_dir)
    first = trainer.world.rank == 0
    trackers = Trackers(
        trainer.config.report_to if first else (), directory=directory, config=asdict(trainer.config)
    )
    file = MetricsFile(directory / "metrics.jsonl")
    if first:
        file.forget_after(trainer.steps_done)
    history: list[dict[str, float]] = []
    try:
        while trainer.steps_done < trainer.config.max_steps:
            history.append(await _one_step(trainer))
            step = trainer.steps_done
            if first:
                file.write(step, history[-1])
                trackers.log(step, history[-1])
                for warning in early_warnings(history):
                    log.warning("step %d: %s", step, warning)
            if trainer.on_metrics is not None:
                trainer.on_metrics(step, history[-1])
            if _due(trainer, trainer.config.save_steps):
                trainer.save_step()
    finally:
        trackers.close()
    return history


async def _one_step(trainer: GRPOTrainer) -> dict[str, float]:
    """Play, train, sync, and evaluate if it is time."""
    started = time.perf_counter()
    groups = await trainer.rollouts.batch(trainer.steps_done)
    played = time.perf_counter()
    metrics = trainer.step(groups)
    sync_engine(trainer)
    metrics["time/rollout"] = played - started
    metrics["step_time"] = time.perf_counter() - started
    if trainer.steps_done == trainer.config.max_steps or _due(trainer, trainer.config.eval_steps):
        metrics |= await trainer.rollouts.evaluate()
    return metrics


def _due(trainer: GRPOTrainer, every: int) -> bool:
    """Return whether something done every so many steps, and at the last, is due; never if 0."""
    done = trainer.steps_done
    return bool(every) and (done % every == 0 or done == trainer.config.max_steps)
