"""What a training plays: batches of groups, the held-out tasks, and the check of first prompts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from types import TracebackType
from typing import Any, Self

from agentenv.core.errors import UsageError
from agentenv.core.limits import RunLimits
from agentenv.core.task import Task
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.engine.base import Connected, Engine, Sampling
from agentenv.envs.spec import EnvSpec
from agentenv.render.renderer import Renderer
from agentenv.runner.options import RunnerOptions
from agentenv.runner.runner import Runner
from agentenv.runs.stats import clustered_mean
from agentenv.train.learner import Learner
from agentenv.train.loop.mixture import Mixture
from agentenv.train.loop.prompts import too_long
from agentenv.train.loop.sync import WeightSync
from agentenv.train.model.adapters import adapter_of

__all__ = ["EpisodeBatch", "PlayOptions", "Rollouts"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """How the episodes of a training are played, beside what its configuration says."""

    limits: RunLimits | None = None
    runner: RunnerOptions | None = None
    on_trajectory: Callable[[Trajectory], None] | None = None
    """Called with each training episode as it finishes."""


class EpisodeBatch:
    """The groups of one step: begun when it is made, all played when it was awaited.

    Args:
        step: number of the step, from 0.
        cursors: tasks taken so far, by environment, those of this batch included.
        plays: each plays the groups of one environment.
    """

    def __init__(
        self,
        step: int,
        cursors: Mapping[str, int],
        plays: Sequence[Coroutine[Any, Any, list[TrajectoryGroup]]],
    ) -> None:
        self.step = step
        self.rounds = 0
        """How often further tasks were added."""
        self.seconds = 0.0
        """Spent on playing, from the first episode to the last of each round."""
        self._finished: list[TrajectoryGroup] = []
        self._begin(cursors, plays)

    def add(
        self, cursors: Mapping[str, int], plays: Sequence[Coroutine[Any, Any, list[TrajectoryGroup]]]
    ) -> None:
        """Begin to play further groups; the batch is awaited again for them."""
        self.rounds += 1
        self._begin(cursors, plays)

    def _begin(
        self, cursors: Mapping[str, int], plays: Sequence[Coroutine[Any, Any, list[TrajectoryGroup]]]
    ) -> None:
        self.cursors = dict(cursors)
        self._began = time.perf_counter()
        self._tasks = [asyncio.ensure_future(play) for play in plays]
        self._played = asyncio.gather(*self._tasks)
        self._played.add_done_callback(self._end)

    def _end(self, played: asyncio.Future[list[list[TrajectoryGroup]]]) -> None:
        self.seconds += time.perf_counter() - self._began
        if not played.cancelled() and played.exception() is None:
            self._finished += [group for groups in played.result() for group in groups]

    def __await__(self) -> Generator[Any, None, object]:
        """Wait until all groups are played."""
        return self._played.__await__()

    @property
    def groups(self) -> tuple[TrajectoryGroup, ...]:
        """The groups of the rounds that are played."""
        return tuple(self._finished)

    @property
    def done(self) -> bool:
        """Whether nothing of it is being played."""
        return all(task.done() for task in self._tasks)

    async def stop(self) -> None:
        """Cancel what is still being played, and wait until its environments are closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._played, *self._tasks, return_exceptions=True)


class Rollouts:
    """Plays a mixture of environments with one engine; a context for the event loop on which it plays.

    Args:
        learner: whose weights play.
        engine: what they play on.
        renderer: of the model.
        mixture: the environments, and which of their tasks are next.
        options: how they are played.
    """

    def __init__(
        self,
        learner: Learner,
        engine: Engine,
        renderer: Renderer,
        mixture: Mixture,
        options: PlayOptions,
    ) -> None:
        self.learner, self.mixture = learner, mixture
        self.config, self._options = learner.config, options
        self.sync = WeightSync(learner, engine, renderer)
        self.runner = Runner(
            engine,
            renderer,
            options.limits,
            options=options.runner,
            sampling=Sampling(temperature=self.config.temperature, adapter=adapter_of(learner.model)),
            run_seed=self.config.seed,
        )
        self.left_out: frozenset[tuple[str, str]] = frozenset()
        """Environment and id of tasks whose prompt is too long."""
        self._batches: list[EpisodeBatch] = []
        """Those that may still be playing, to be stopped at the end."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop what is being played, and close what the engine holds open on this event loop."""
        try:
            for batch in self._batches:
                await batch.stop()
        finally:
            self._batches.clear()
            if isinstance(self.runner.engine, Connected):
                await self.runner.engine.disconnect()

    # Playing ------------------------------------------------------------------------------

    def begin(self, step: int, cursors: Mapping[str, int]) -> EpisodeBatch:
        """Begin to play the groups of one step, from a place in the tasks on."""
        after, plays = self._deal(self._round_index(step, 0), self.config.groups_per_step, cursors)
        batch = EpisodeBatch(step, after, plays)
        self._batches = [one for one in self._batches if not one.done] + [batch]
        return batch

    def begin_ahead(self, batch: EpisodeBatch) -> EpisodeBatch | None:
        """Begin to play the batch after this one, if it is to be played while this one trains."""
        if not self.config.asynchronous or batch.step + 1 == self.config.max_steps:
            return None
        return self.begin(batch.step + 1, batch.cursors)

    def refill(self, batch: EpisodeBatch) -> bool:
        """Begin to play further tasks for a batch if too few of its groups have a gradient.

        Which groups have one is settled between the ranks, so this must not run beside an update.

        Returns:
            False if there are enough, or if the rounds are used up.
        """
        if batch.rounds == self.config.refill_rounds:
            return False
        wanted = self.config.groups_per_step - self.learner.count_mixed(batch.groups)
        if wanted <= 0:
            return False
        round_index = self._round_index(batch.step, batch.rounds + 1)
        batch.add(*self._deal(round_index, wanted, batch.cursors))
        return True

    def _round_index(self, step: int, refill: int) -> int:
        return step * (1 + self.config.refill_rounds) + 1 + refill

    def _deal(
        self, round_index: int, wanted: int, cursors: Mapping[str, int]
    ) -> tuple[dict[str, int], list[Coroutine[Any, Any, list[TrajectoryGroup]]]]:
        """Return the cursors behind the tasks of a round, and what plays this process's share of them."""
        dealt, after = self.mixture.deal(
            wanted, seed=self.config.seed, round_index=round_index, cursors=cursors, left_out=self.left_out
        )
        world = self.learner.world
        # Over all environments together: the odd tasks of each would otherwise be the first rank's.
        mine = dealt[world.rank :: world.size]
        parts = [
            (entry, [task for owner, task in mine if owner == index])
            for index, entry in enumerate(self.mixture.specs)
        ]
        return after, [self._play(entry, tasks, round_index) for entry, tasks in parts if tasks]

    async def _play(self, entry: EnvSpec, tasks: Sequence[Task], round_index: int) -> list[TrajectoryGroup]:
        """Play a group for each task of one environment."""
        played = self.runner.run_groups(
            entry,
            tasks,
            self.config.num_generations,
            round_index=round_index,
            on_trajectory=self._options.on_trajectory,
        )
        # In an order that does not depend on which episode was quick.
        return sorted([group async for group in played], key=lambda group: group.group_id)

    # Before and after ---------------------------------------------------------------------

    async def leave_out_long_prompts(self, cursors: Mapping[str, int]) -> dict[str, float]:
        """Leave out tasks whose first prompt has no room, of those that the rest of the run will meet.

        Returns:
            `tasks/checked` and `tasks/too_long`, for each environment if there are several.

        Raises:
            UsageError: No task of an environment is left.
        """
        counts: dict[str, float] = {}
        world = self.learner.world
        for entry, weight in zip(self.mixture.specs, self.mixture.weights, strict=True):
            tasks = self._upcoming(entry, weight / sum(self.mixture.weights), cursors)
            mine = tasks[world.rank :: world.size]
            found = world.gather(await too_long(self.runner, entry, mine, self.config))
            prefix = "tasks" if len(self.mixture.specs) == 1 else f"tasks/{entry.id}"
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

    def _upcoming(self, entry: EnvSpec, share: float, cursors: Mapping[str, int]) -> list[Task]:
        """Return the different tasks that an environment will be asked for, about."""
        rounds = (self.config.max_steps - self.learner.steps_done) * (1 + self.config.refill_rounds)
        wanted = ceil(max(0, rounds) * self.config.groups_per_step * share)
        tasks = self.mixture.tasks_of(entry)
        if tasks.num_tasks is not None:
            wanted = min(wanted, tasks.num_tasks)
        upcoming = islice(self.mixture.rounds(entry, self.config.seed, cursors.get(entry.id, 0)), wanted)
        return list({task.id: task for task in upcoming}.values())

    async def evaluate_alone(self) -> dict[str, float]:
        """Do what `evaluate` does, outside a training."""
        async with self:
            return await self.evaluate()

    async def evaluate(self) -> dict[str, float]:
        """Play the held-out tasks greedily, each once; see `GRPOTrainer.evaluate`."""
        await self.sync.follow()
        metrics: dict[str, float] = {}
        world = self.learner.world
        greedy = replace(self.runner.sampling, temperature=0.0)
        for entry in self.mixture.specs:
            tasks = self.mixture.held_out(entry)
            if tasks is None:
                continue
            limit = self.config.eval_tasks
            if tasks.endless and not limit:
                log.warning("%s is not evaluated: its held-out tasks never end; set eval_tasks", entry.id)
                continue
            chosen = list(tasks.take(limit) if limit else tasks)
            mine = chosen[world.rank :: world.size]
            prefix = "eval" if len(self.mixture.specs) == 1 else f"eval/{entry.id}"
            played = self.runner.run_groups(entry, mine, 1, sampling=greedy)
            rewards = [one.reward async for group in played for one in group]
            metrics |= {f"{prefix}/{name}": value for name, value in _scores(world.gather(rewards)).items()}
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
