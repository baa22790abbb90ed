"""Play further seats of a game with the policy, each in an episode beside that of the game.

Rules:

1. A seat's episode is an ordinary one: it has its own conversation, tokens, seeds, limits and record.
2. The records of a game are complete together. They are handed out with the record of the game's own
   episode, as its `other_seats`; an attempt that is played again hands out none.
3. If the episode of one seat fails, those of all seats fail, because the game has no outcome.
4. A seat that had no turn has no record.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeAlias

from agentenv.core.episode_env import EpisodeEnv
from agentenv.core.errors import EnvironmentMisuse, UsageError
from agentenv.core.seats import SeatEpisode, at_seat
from agentenv.core.trajectory import EpisodeError, StopReason, Trajectory
from agentenv.engine.interface import ChatEngine, Engine
from agentenv.engine.scripted.replayed import ChatReplayEngine, ReplayEngine
from agentenv.runner.episode import Episode
from agentenv.runner.guard import Failure, Guard
from agentenv.runner.plan import Plan

__all__ = ["Seats"]

_END_S = 30.0
"""Time in which the episodes of the seats must end after the game; only scoring can keep them."""

_Opened: TypeAlias = AbstractAsyncContextManager[tuple[Episode, "asyncio.Future[Trajectory]"]]
_Attempt: TypeAlias = Callable[[Plan, EpisodeEnv], _Opened]


class Seats:
    """The further seats of one attempt at an episode.

    Args:
        plan: plan of the game's own episode.
        guard: guard of that episode.
        attempt: starts the episode of a seat.
        context: context of the game's episode, in which the episodes of the seats are begun.
        engine: the engine of the game; a replaying one plays no seats.
    """

    def __init__(
        self,
        plan: Plan,
        guard: Guard,
        attempt: _Attempt,
        context: contextvars.Context,
        *,
        engine: Engine | ChatEngine,
    ) -> None:
        self._plan = plan
        self._guard = guard
        self._attempt = attempt
        replayed = isinstance(engine, ReplayEngine | ChatReplayEngine)
        self._whole = plan.job.branch is None and not replayed
        self._context = context
        self._opened: dict[str, _Seat] = {}
        self._complete = True

    @property
    def opened(self) -> bool:
        """Whether any seat's episode was begun."""
        return bool(self._opened)

    def open(self, seat: str, env: EpisodeEnv) -> SeatEpisode:
        """Begin the episode of a seat; see `agentenv.core.seats.OpenSeat`.

        Raises:
            UsageError: The episode is replayed, or goes on from one of its turns.
            EnvironmentMisuse: The seat is open already.
        """
        plan = self._plan
        if not self._whole:
            raise UsageError(
                "a game in which the policy plays several seats can neither be replayed nor branched",
                remedy="play it from its beginning, without branches",
            )
        if seat in self._opened:
            raise EnvironmentMisuse(f"the seat {seat} is played already")
        job = replace(
            plan.job,
            task_id=at_seat(plan.job.task_id, seat),
            task={**plan.job.task, "seat": seat},
            group_id=at_seat(plan.job.group_id, seat),
        )
        # The game's own episode limits the time: this one mostly waits for the others' turns.
        limits = replace(plan.rules.limits, env_timeout_s=None, episode_timeout_s=None)
        own = Plan(replace(plan.rules, limits=limits), job, plan.member)
        self._complete = False
        opened = self._opened[seat] = _Seat(self._guard, self._attempt(own, env), self._context.copy())
        return opened

    async def finish(self, record: Trajectory) -> None:
        """Wait until the seats' episodes have ended, as the game has; end them if it failed."""
        if not self._opened:
            return
        if not record.stop_reason.failed:
            await asyncio.wait([seat.task for seat in self._opened.values()], timeout=_END_S)
        await self.stop()
        self._complete = True

    async def stop(self) -> None:
        """Cancel the episodes that are still played, and wait until their resources are closed."""
        running = {seat.task for seat in self._opened.values() if not seat.task.done()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def joined(self, record: Trajectory | None) -> Trajectory | None:
        """Return the record of the game's episode with those of the seats; None if they are not complete."""
        if record is None or not self._complete:
            return None
        if not self._opened:
            return record
        records = (seat.ended(record) for seat in self._opened.values())
        return replace(record, other_seats=tuple(one for one in records if one is not None))


class _Seat:
    """The episode of one seat, in a task of its own."""

    def __init__(self, guard: Guard, attempt: _Opened, context: contextvars.Context) -> None:
        self._guard = guard
        self._episode: Episode | None = None
        self.task = asyncio.create_task(self._play(attempt), context=context)

    async def _play(self, attempt: _Opened) -> Trajectory:
        async with attempt as (self._episode, playing):
            return await playing

    async def wait(self, move: asyncio.Future[str | None]) -> None:
        """Wait until the seat has moved or its episode has ended; see `SeatEpisode`.

        Raises:
            Failure: The seat's episode failed.
        """
        with self._guard.other_episode():
            await asyncio.wait({move, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if not move.done():
            record = self.task.result()
            if record.error is not None:
                raise Failure(record.stop_reason, record.error)

    def ended(self, game: Trajectory) -> Trajectory | None:
        """Return the record of the seat once the game is over; None if the seat had no turn."""
        played = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        record = self.task.result() if played else None
        if game.error is not None and (record is None or record.error is None):
            record = self._failed(game.stop_reason, game.error)
        return record if record is not None and record.turns else None

    def _failed(self, reason: StopReason, error: EpisodeError) -> Trajectory | None:
        return None if self._episode is None else self._episode.give_up(Failure(reason, error))
