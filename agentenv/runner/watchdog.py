"""Nothing waits for ever: whoever hangs is named, and whoever ignores its limit is left behind.

Limits cancel what takes too long. Code that swallows its cancellation would still hold its episode;
the watchdog then ends the episode without it, and counts the abandoned code.
"""

from __future__ import annotations

import asyncio
import logging
import time
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


@dataclass(slots=True)
class _Watched:
    episode: Episode
    given_up: asyncio.Future[None]
    warned_since: float = -1.0


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
        self._watched: dict[str, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def episodes(self) -> list[Episode]:
        """Episodes in flight."""
        return [watched.episode for watched in self._watched.values()]

    def waiting(self) -> list[Waiting]:
        """What the episodes in flight wait for, longest first."""
        now = time.monotonic()
        waits = ((name, watched.episode.waits) for name, watched in self._watched.items())
        found = [Waiting(name, wait.boundary, now - wait.since) for name, wait in waits]
        return sorted(found, key=lambda one: -one.seconds)

    async def play(self, name: str, episode: Episode) -> Trajectory:
        """Play an episode; it ends even if the code it waits for ignores its cancellation."""
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(episode.play())
        watched = _Watched(episode, loop.create_future())
        self._watched[name] = watched
        if self._timer is None:
            self._timer = loop.call_later(_PERIOD_S, self._look)
        try:
            await asyncio.wait({task, watched.given_up}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=self._grace_s)
            raise
        finally:
            watched.given_up.cancel()
            del self._watched[name]
            if not self._watched:
                self._rest()
        boundary = episode.waits.boundary
        if task.cancelled():
            # Nobody else cancels this task: code that the episode ran has cancelled its own caller.
            own = RuntimeError(f"{boundary}: the code cancelled the task that the episode runs in")
            return episode.give_up(Failure.of(boundary, own))
        if task.done():
            return task.result()
        self.abandoned += 1
        task.cancel()
        stuck = TimeoutError(f"{boundary}: no answer within its limit, and its cancellation was ignored")
        return episode.give_up(Failure.of(boundary, stuck))

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._look)
        now = time.monotonic()
        for name, watched in self._watched.items():
            waits = watched.episode.waits
            if waits.due is not None and now > waits.due + self._grace_s and not watched.given_up.done():
                watched.given_up.set_result(None)
            elif self._is_late(now - waits.since) and watched.warned_since != waits.since:
                watched.warned_since = waits.since
                _log.warning("%s has waited %.0f s for: %s", name, now - waits.since, waits.boundary)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self, seconds: float) -> bool:
        return self._warn_after_s is not None and seconds > self._warn_after_s
