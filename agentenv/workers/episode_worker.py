"""What a worker process does: open a recipe, play the orders of the driver, and report how it is doing."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from agentenv.core.collector import fewer_collections
from agentenv.core.imports import import_object
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.threads import abandoned_threads
from agentenv.core.trajectory import Trajectory
from agentenv.engine.interface import Completion, Sampling, features_of
from agentenv.engine.scripted.policy import PolicyEngine
from agentenv.engine.vllm.assigned import on_server
from agentenv.engine.weights import SharesServers
from agentenv.runner.conversation.tokens import KeptTurns, kept_turns
from agentenv.runner.plan import Job
from agentenv.runner.runner import Runner
from agentenv.runner.stage import Stage
from agentenv.runner.watchdog import Waiting
from agentenv.workers.handshake import parts_here
from agentenv.workers.recipe import Recipe
from agentenv.workers.usage import Usage

__all__ = ["EpisodeWorker", "Order", "OrderKey", "Played", "StageRecipe"]


@dataclass(frozen=True, slots=True)
class StageRecipe:
    """What a stage of the driver has beyond the recipe of the run."""

    env: int
    """Index of the environment in the recipe."""
    limits: RunLimits
    sampling: Sampling
    done_policy: DonePolicy
    env_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])


OrderKey = tuple[int, str, int]
"""Number of the stage, id of the group, and member."""


@dataclass(frozen=True, slots=True)
class Order:
    """One episode to play."""

    stage: int
    """Number of the stage, by which a worker remembers it."""
    stage_recipe: bytes
    """The pickled `StageRecipe`."""
    job: Job
    member: int
    server: int | None = None
    """Index of the engine's server that is assigned to the episode; None if the worker chooses."""
    kept: Mapping[str, Completion] = field(default_factory=dict[str, Completion])
    """Completions of an attempt whose worker died, by their request; see `KeptTurns`."""

    @property
    def key(self) -> OrderKey:
        """What names the episode among all of a crew."""
        return self.stage, self.job.group_id, self.member


@dataclass(frozen=True, slots=True)
class Played:
    """A finished episode."""

    record: Trajectory
    encoded: object = None
    """What the function that the recipe names made of the record."""
    hanging: int = 0
    """Number of threads of the worker that hang in calls that were given up."""
    spent: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the worker's requests have cost so far, if its engine counts that."""


class EpisodeWorker:
    """Plays orders in this process; `async with` opens and closes it.

    Args:
        recipe: JSON text of the recipe.
        name: name of the worker, which no other worker of the run ever had.
    """

    # Invariant: every stage in `_stages` was entered on `_open`, which closes it.

    def __init__(self, recipe: str, name: str) -> None:
        self._recipe = Recipe.from_json(recipe)
        self._name = name
        self._stages: dict[int, Stage] = {}
        self._opening = asyncio.Lock()
        self._open = AsyncExitStack()
        self._encode: Callable[[Trajectory], object] | None = None
        self._running: dict[int, asyncio.Task[Played]] = {}
        self._kept: dict[OrderKey, KeptTurns] = {}
        self._usage = Usage()
        self._runner: Runner | None = None

    async def __aenter__(self) -> Self:
        self._recipe.enter_directory()
        self._specs = self._recipe.load_specs()
        self._runner = self._recipe.load_runner(name=f"{self._name}.")
        self._open.push_async_callback(self._runner.engine.close)
        if self._recipe.encode:
            self._encode = import_object(self._recipe.encode)
        await self._open.enter_async_context(self._usage)
        self._open.enter_context(fewer_collections())
        return self

    def parts(self) -> dict[str, str]:
        """Return what this process plays with; see `agentenv.workers.handshake`."""
        return parts_here(self._specs)

    async def __aexit__(self, *_: object) -> None:
        """Cancel the running episodes, and wait until their environments and the engine are closed."""
        for task in self._running.values():
            task.cancel()
        if self._running:
            await asyncio.wait(list(self._running.values()))
        await self._open.aclose()

    async def play(self, key: int, order: Order) -> Played | None:
        """Play one episode; return None if it was cancelled before its record was complete.

        Args:
            key: number by which `cancel` finds the episode.
            order: the episode.
        """
        task = self._running[key] = asyncio.create_task(self._play(order))
        self._usage.live += 1
        try:
            await asyncio.wait({task})
        finally:
            del self._running[key]
            self._usage.live -= 1
        if task.cancelled():
            return None
        self._usage.done += 1
        return task.result()

    def cancel(self, key: int) -> None:
        """Cancel an episode; `play` returns when its environment is closed."""
        task = self._running.get(key)
        if task is not None:
            task.cancel()

    def expect_weights(self, version: int, run: str) -> None:
        """Tell the engine which weights its servers have now, because the driver changed them."""
        engine: Any = self._open_runner.engine
        if isinstance(engine, SharesServers):
            engine.follow(run, version)
        else:
            engine.weights_version = version

    def stats(self) -> dict[str, Any]:
        """Return how the worker is doing: episodes, memory, processor time, delay of its event loop."""
        if self._runner is None:
            return {"worker": self._name}  # it could not be opened
        waiting, rows = self._runner.watchdog.waiting(), features_of(self._runner.engine).servers()
        servers = {"servers": rows} if rows else {}
        return {"worker": self._name, **self._usage.row(), "waits": _waits(waiting), **servers}

    def turns(self) -> dict[OrderKey, dict[str, Completion]]:
        """Return the completions of long episodes since the last call."""
        new = ((key, kept.take()) for key, kept in self._kept.items())
        return {key: turns for key, turns in new if turns}

    @property
    def _open_runner(self) -> Runner:
        assert self._runner is not None, "the worker is not open"
        return self._runner

    async def _play(self, order: Order) -> Played:
        stage = self._stages.get(order.stage) or await self._open_stage(order)
        record: list[Trajectory] = []
        kept = self._kept[order.key] = KeptTurns(order.kept)
        # A policy of the author draws each turn from the same generator, so it must be asked for all of them.
        if not isinstance(self._open_runner.engine, PolicyEngine):
            kept_turns.set(kept)  # for this task alone, which plays nothing else
        try:
            with on_server(order.server):
                await stage.play(order.job, order.member, on_record=record.append)
        except asyncio.CancelledError:
            if not record:
                raise
            # The record was complete before the cancellation arrived, so the episode counts as played.
        finally:
            del self._kept[order.key]
        encoded = None if self._encode is None else self._encode(record[0])
        spent = features_of(self._open_runner.engine).metrics()
        return Played(record[0], encoded, len(abandoned_threads()), spent)

    async def _open_stage(self, order: Order) -> Stage:
        async with self._opening:
            if order.stage in self._stages:
                return self._stages[order.stage]
            recipe: StageRecipe = pickle.loads(order.stage_recipe)  # noqa: S301 - the driver wrote it
            stage = self._open_runner.stage(
                self._specs[recipe.env],
                limits=recipe.limits,
                sampling=recipe.sampling,
                done_policy=recipe.done_policy,
                env_kwargs=recipe.env_kwargs,
            )
            self._stages[order.stage] = await self._open.enter_async_context(stage)
            return stage


def _waits(waiting: Sequence[Waiting]) -> dict[str, dict[str, float]]:
    """Return, for each part of the system that episodes wait for, their number and the longest wait."""
    longest: dict[str, dict[str, float]] = {}
    for wait in waiting:  # the longest wait comes first
        entry = longest.setdefault(wait.boundary, {"episodes": 0, "longest_s": round(wait.seconds, 1)})
        entry["episodes"] += 1
    return longest
