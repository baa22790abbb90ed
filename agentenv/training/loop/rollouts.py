"""Play the episodes of a training: batches of groups, and held-out tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from agentenv.core.episode_env import Task
from agentenv.core.limits import RunLimits
from agentenv.core.trajectory import TrajectoryGroup
from agentenv.core.visible import logger
from agentenv.engine.interface import Engine, Sampling, features_of
from agentenv.envs.spec import EnvSpec
from agentenv.render.renderer import Renderer
from agentenv.runner.options import RunnerOptions
from agentenv.runner.runner import Runner
from agentenv.training.learners.learner import Learner
from agentenv.training.loop.callbacks import Callbacks
from agentenv.training.loop.held_out import play_held_out
from agentenv.training.loop.mixture import Mixture, TaskPosition
from agentenv.training.loop.sync import WeightSync
from agentenv.training.step import GRPO

if TYPE_CHECKING:
    from agentenv.workers.crew import Crew

__all__ = ["EpisodeBatch", "PlayOptions", "Rollouts", "RunningPlay", "training_sampling"]

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """Options for playing the episodes of a training that are not part of its configuration."""

    limits: RunLimits | None = None
    runner: RunnerOptions | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)
    crew: Crew | None = None
    """Workers that play the episodes; None plays them in this process."""


class RunningPlay(Protocol):
    """Something that plays episodes until it is done or stopped."""

    @property
    def done(self) -> bool:
        """Whether no episode is still being played."""
        ...

    async def stop(self) -> None:
        """Cancel the running episodes, and wait until their environments are closed."""
        ...


class EpisodeBatch:
    """The groups of one step. Playing starts with the constructor, and awaiting the batch finishes it.

    Args:
        step: number of the step, from 0.
        cursors: number of tasks taken so far, by environment, including those of this batch.
        plays: coroutines, each of which plays the groups of one environment.
        last_round: index of the last round that the batch may deal.
    """

    def __init__(
        self,
        step: int,
        cursors: Mapping[str, int],
        plays: Sequence[Coroutine[Any, Any, list[TrajectoryGroup]]],
        *,
        last_round: int,
    ) -> None:
        self.step = step
        self._last_round = last_round
        self.rounds = 0
        """Number of times that further tasks were added."""
        self.seconds = 0.0
        """Seconds spent on playing: the sum over rounds, each from its first to its last episode."""
        self._finished: list[TrajectoryGroup] = []
        self._begin(cursors, plays)

    def add(
        self, cursors: Mapping[str, int], plays: Sequence[Coroutine[Any, Any, list[TrajectoryGroup]]]
    ) -> None:
        """Start to play further groups; await the batch again to finish them."""
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
        """The groups of all finished rounds."""
        return tuple(self._finished)

    @property
    def metrics(self) -> dict[str, float]:
        """Seconds that the batch was played. It waits for its own groups only."""
        return {"time/rollout": self.seconds, "time/wait/staleness": 0.0}

    def trained(self, gather: Callable[[Sequence[Any]], Sequence[Any]]) -> TaskPosition:
        """Return the position behind the batch, which is the same in all processes."""
        return TaskPosition(dict(self.cursors), self._last_round)

    @property
    def done(self) -> bool:
        """Whether no episode of the batch is still being played."""
        return all(task.done() for task in self._tasks)

    async def stop(self) -> None:
        """Cancel the running episodes, and wait until their environments are closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._played, *self._tasks, return_exceptions=True)


class Rollouts:
    """Plays a mixture of environments with one engine, as an async context.

    Args:
        grpo: the algorithm that trains on the episodes, with the learner whose weights play.
        engine: the engine that generates the episodes.
        renderer: renderer of the model.
        mixture: the environments and the order of their tasks.
        options: options for playing the episodes.
    """

    def __init__(
        self,
        grpo: GRPO[Any],
        engine: Engine,
        renderer: Renderer,
        mixture: Mixture,
        options: PlayOptions,
    ) -> None:
        self.grpo, self.mixture = grpo, mixture
        learner: Learner = grpo.learner
        self.learner = learner
        self.config, self.options = learner.config, options
        self._sampling = learner.config.sampling
        self._engine, self._renderer = engine, renderer
        self.crew = options.crew
        self._watched: AbstractAsyncContextManager[None] = nullcontext()
        tell = options.callbacks.on_servers
        # The servers of workers are reported with the workers.
        if options.crew is None and tell is not None and features_of(engine).servers():
            from agentenv.workers.reports import reporting_servers  # loaded here: few engines are servers

            self._watched = reporting_servers(engine, tell)
        tell = None if options.crew is None else options.crew.expect_weights
        self.sync = WeightSync(learner, engine, renderer, tell)
        self.runner = Runner(
            engine,
            renderer,
            options.limits,
            options=options.runner,
            sampling=training_sampling(learner),
            run_seed=self.config.seed,
            elsewhere=options.crew,
            processes=learner.world.size,
        )
        self._playing: list[RunningPlay] = []
        self._rounds_before = 0
        """Number of rounds beyond those that the steps so far would have dealt in whole batches."""

    async def __aenter__(self) -> Self:
        """Start the workers, if there are any."""
        if self.options.crew is not None:
            await self.options.crew.__aenter__()
        await self._watched.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the running batches and the workers, and close the engine's connections on this event loop."""
        try:
            for playing in self._playing:
                await playing.stop()
        finally:
            self._playing.clear()
            await self.sync.stop()
            await self._watched.__aexit__(None, None, None)
            if self.options.crew is not None:
                await self.options.crew.__aexit__(None, None, None)
            await features_of(self.runner.engine).disconnect()

    # Playing ----------------------------------------------------------------------------------

    def begin(self, step: int, cursors: Mapping[str, int]) -> EpisodeBatch:
        """Start to play the groups of one step, with the tasks that follow the cursors."""
        after, plays = self._deal(self._round_index(step, 0), self._sampling.groups_per_step, cursors)
        batch = EpisodeBatch(
            step, after, plays, last_round=self._round_index(step, self._sampling.refill_rounds)
        )
        self.stop_at_the_end(batch)
        return batch

    def stop_at_the_end(self, playing: RunningPlay) -> None:
        """Stop this when the context ends, if it still plays."""
        self._playing = [running for running in self._playing if not running.done] + [playing]

    def refill(self, batch: EpisodeBatch) -> bool:
        """Start to play further tasks for a batch if too few of its groups have a gradient.

        The ranks communicate to count these groups, so this must not run during an update.

        Returns:
            False if there are enough groups, or if the rounds are used up.
        """
        if batch.rounds == self._sampling.refill_rounds:
            return False
        wanted = self._sampling.groups_per_step - self.grpo.count_mixed(batch.groups)
        if wanted <= 0:
            return False
        round_index = self._round_index(batch.step, batch.rounds + 1)
        batch.add(*self._deal(round_index, wanted, batch.cursors))
        return True

    def go_on_after(self, rounds: int) -> None:
        """Number the rounds so that none has the number of one of the rounds that were dealt before."""
        self._rounds_before = max(0, rounds - self.grpo.steps_done * (1 + self._sampling.refill_rounds))

    def _round_index(self, step: int, refill: int) -> int:
        return self._rounds_before + step * (1 + self._sampling.refill_rounds) + 1 + refill

    def _deal(
        self, round_index: int, wanted: int, cursors: Mapping[str, int]
    ) -> tuple[dict[str, int], list[Coroutine[Any, Any, list[TrajectoryGroup]]]]:
        """Return the cursors after a round's tasks, and coroutines that play this process's share of them."""
        dealt, after = self.mixture.deal(
            wanted, seed=self.config.seed, round_index=round_index, cursors=cursors
        )
        world = self.learner.world
        # Tasks are split over all environments together. Split for each one, the first rank would get every
        # remainder.
        mine = dealt[world.rank :: world.size]
        parts = [
            (
                entry,
                [(drawn.task, drawn.repeat) for drawn in mine if drawn.owner == index],
            )
            for index, entry in enumerate(self.mixture.specs)
        ]
        return after, [self._play(entry, tasks, round_index) for entry, tasks in parts if tasks]

    async def _play(
        self, entry: EnvSpec, tasks: Sequence[tuple[Task, int]], round_index: int
    ) -> list[TrajectoryGroup]:
        """Play a group for each task of one environment; each task comes with its number of repeats."""
        chosen = tuple(task for task, _ in tasks)
        played = self.runner.run_groups(
            entry,
            chosen,
            self._sampling.num_generations,
            on_trajectory=self.options.callbacks.on_trajectory,
            round_index=round_index,
            repeats=[repeat for _, repeat in tasks],
        )
        # Sorted, so that the order does not depend on which episode finished first.
        return sorted([group async for group in played], key=lambda group: group.group_id)

    # Held-out tasks -----------------------------------------------------------------------

    async def evaluate_alone(self, temperature: float | None = None) -> dict[str, float]:
        """Do what `evaluate` does, in a context of its own."""
        async with self:
            return await self.evaluate(temperature)

    def evaluate(self, temperature: float | None = None) -> Coroutine[Any, Any, dict[str, float]]:
        """Play the held-out tasks; see `GRPOTrainer.evaluate`."""
        keep = self.options.callbacks.on_held_out
        return play_held_out(
            self.runner, self.mixture, self.learner, self.sync, temperature=temperature, on_trajectory=keep
        )


def training_sampling(learner: Learner) -> Sampling:
    """Return the settings with which the episodes of a training are sampled, on engines and in workers."""
    options = learner.config.sampling
    return Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        # Each token is trained as one of those that it was sampled from.
        keep_support=options.is_cut,
        stop=options.stop,
        adapter=learner.adapter,
    )
