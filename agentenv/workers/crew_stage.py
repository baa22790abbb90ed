"""The driver's side of a stage that workers hold: it sends the orders and counts the episodes."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from agentenv.core.errors import UsageError
from agentenv.core.trajectory import Trajectory
from agentenv.runner.plan import Job
from agentenv.runner.stage import Stage
from agentenv.runner.watchdog import Ledger
from agentenv.workers.episode_worker import Order, StageRecipe
from agentenv.workers.servers import ServerShares

__all__ = ["CrewStage", "PlaysOrders"]


class PlaysOrders(Protocol):
    """The part of a crew that a stage uses."""

    servers: ServerShares

    async def play(self, order: Order, env_id: str) -> Trajectory:
        """Play one episode and return its record."""
        ...


class CrewStage:
    """Plays single episodes of one environment on a crew.

    Args:
        crew: plays the episodes.
        stage: the stage of this process whose episodes are played; it is never opened.
        ledger: counts of the run.
        number: number of the stage, by which workers remember it.
        env: index of the environment in the recipe.
    """

    def __init__(self, crew: PlaysOrders, stage: Stage, ledger: Ledger, *, number: int, env: int) -> None:
        self._crew = crew
        self._env_id = stage.spec.id
        self._ledger = ledger
        self._number = number
        rules = stage.rules
        recipe = StageRecipe(env, rules.limits, rules.sampling, rules.done_policy, dict(stage.env_kwargs))
        self._recipe = _pickled(recipe, f"the arguments of {self._env_id}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the stage; the workers keep theirs open until the crew ends."""

    async def play(
        self, job: Job, member: int = 0, *, on_record: Callable[[Trajectory], None] | None = None
    ) -> Trajectory:
        """Play one member of a group and return its record; see `Stage.play`."""
        self._ledger.start()
        try:
            with self._crew.servers.lend() as server:
                order = Order(self._number, self._recipe, job, member, server)
                record = await self._crew.play(order, self._env_id)
        except BaseException:
            self._ledger.cancel()
            raise
        self._ledger.finish(record)
        if on_record is not None:
            on_record(record)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError  # the record was complete before the cancellation arrived
        return record


def _pickled(value: object, what: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise UsageError(f"{what} cannot be sent to a worker: {error}") from error
