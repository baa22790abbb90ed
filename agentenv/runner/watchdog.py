"""Log and end hung episodes.

Time limits cancel what takes too long. Code that swallows its cancellation would still hold its episode:
the watchdog then ends the episode without it, and counts the abandoned code.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentenv.core.trajectory import Trajectory
from agentenv.runner.episode import Episode
from agentenv.runner.guard import Boundary, Failure

__all__ = ["Waiting", "Watchdog"]

_log = logging.getLogger(__name__)
_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """What one episode in flight waits for."""

    episode_id: str
    boundary: Boundary
    seconds: float


class _Watched:
    """An episode that is being played in a task of its own, and the future of its record."""

    # Invariant: `record` is settled once, by whichever comes first: the task's end, the watchdog, or the
    # cancellation of whoever awaits it. Only then may the task be left behind.
    __slots__ = ("episode", "record", "task", "warned_since")

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.record: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        self.warned_since = -1.0
        self.task = asyncio.create_task(episode.play())
        self.task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Trajectory]) -> None:
        if self.record.done():
            return
        if task.cancelled():
            # Nobody else cancels this task: code that the episode ran has cancelled its own caller.
            boundary = self.episode.guard.boundary
            own = RuntimeError(f"{boundary}: the code cancelled the task that the episode runs in")
            self.record.set_result(self.episode.give_up(Failure.of(boundary, own)))
        elif (error := task.exception()) is not None:
            self.record.set_exception(error)
        else:
            self.record.set_result(task.result())

    def abandon(self) -> None:
        """End the episode without the code that it waits for."""
        boundary = self.episode.guard.boundary
        stuck = TimeoutError(f"{boundary}: no answer within its limit, and its cancellation was ignored")
        self.record.set_result(self.episode.give_up(Failure.of(boundary, stuck)))
        self.task.cancel()


class Watchdog:
    """Plays episodes and watches what they wait for.

    Args:
        warn_after_s: log what an episode waits for after this; None never.
        grace_s: for code to obey its cancellation.
    """

    def __init__(self, *, warn_after_s: float | None, grace_s: float) -> None:
        self.abandoned = 0
        """Episodes that were ended without the code they waited for."""
        self._warn_after_s = warn_after_s
        self._grace_s = grace_s
        # Invariant: the timer runs exactly while an episode is watched.
        self._watched: dict[str, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def episodes(self) -> list[Episode]:
        """Episodes in flight."""
        return [watched.episode for watched in self._watched.values()]

    def waiting(self) -> list[Waiting]:
        """What the episodes in flight wait for, longest first."""
        now = time.monotonic()
        guards = ((name, watched.episode.guard) for name, watched in self._watched.items())
        waits = [Waiting(name, guard.boundary, now - guard.since) for name, guard in guards]
        return sorted(waits, key=lambda wait: -wait.seconds)

    @asynccontextmanager
    async def playing(self, name: str, episode: Episode) -> AsyncGenerator[asyncio.Future[Trajectory]]:
        """Play an episode; the future is settled even if the code it waits for ignores its cancellation."""
        watched = self._watched[name] = _Watched(episode)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._look)
        try:
            yield watched.record
        except asyncio.CancelledError:
            watched.task.cancel()
            await asyncio.wait({watched.task}, timeout=self._grace_s)
            raise
        finally:
            del self._watched[name]
            if not self._watched:
                self._timer.cancel()
                self._timer = None

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._look)
        now = time.monotonic()
        for name, watched in self._watched.items():
            guard = watched.episode.guard
            waited_s = now - guard.since
            if guard.due is not None and now > guard.due + self._grace_s and not watched.record.done():
                self.abandoned += 1
                watched.abandon()
            elif self._is_late(waited_s) and watched.warned_since != guard.since:
                watched.warned_since = guard.since
                _log.warning("%s has waited %.0f s for: %s", name, waited_s, guard.boundary)

    def _is_late(self, seconds: float) -> bool:
        return self._warn_after_s is not None and seconds > self._warn_after_s
