"""A time limit that does not count the time in which the event loop ran nothing.

One episode may hold the loop up for seconds, with a huge text or an environment that blocks. When it goes on,
the limits of all others are over at once, before their answers are looked at. So the time in which the loop
was late is added to every limit that was running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from weakref import WeakKeyDictionary

__all__ = ["FairTimeout", "lag_of"]

TICK_S = 0.25
SLACK_S = 0.1
"""Lateness of a timer that is usual on a busy machine."""


class Lag:
    """How late an event loop was, in all, while somebody looked; it looks every `TICK_S`.

    Args:
        loop: the event loop.
    """

    # Invariant: the timer runs exactly while `users` is positive.
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._users = 0
        self._total_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def join(self) -> float:
        """Look at the loop until `leave`; return the seconds until now."""
        self._users += 1
        if self._timer is None:
            self._timer = self._loop.call_later(TICK_S, self.seconds)
        return self.seconds()

    def leave(self) -> None:
        """Look no more, unless others do."""
        self._users -= 1
        if not self._users and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def seconds(self) -> float:
        """Return for how many seconds the loop was late until now."""
        late_s = 0.0 if self._timer is None else self._loop.time() - self._timer.when()
        if self._timer is not None and late_s >= 0:
            self._total_s += late_s if late_s > SLACK_S else 0.0
            self._timer.cancel()
            self._timer = self._loop.call_later(TICK_S, self.seconds)
        return self._total_s


_lags: WeakKeyDictionary[asyncio.AbstractEventLoop, Lag] = WeakKeyDictionary()


def lag_of(loop: asyncio.AbstractEventLoop) -> Lag:
    """Return what looks at an event loop."""
    if (lag := _lags.get(loop)) is None:
        lag = _lags[loop] = Lag(loop)
    return lag


class FairTimeout:
    """`asyncio.timeout`, but for the time in which the event loop was late.

    Args:
        seconds: time limit.
        moved: is told the seconds by which the limit was moved.
    """

    __slots__ = ("_lag", "_loop", "_moved", "_seen_s", "_timeout", "_timer")

    def __init__(self, seconds: float, moved: Callable[[float], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._lag = lag_of(self._loop)
        self._moved = moved
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._seen_s = self._lag.join()
        self.reschedule(seconds)

    def reschedule(self, seconds: float | None) -> None:
        """Set the limit anew, from now on."""
        if self._timer is not None:
            self._timer.cancel()
        self._seen_s = self._lag.seconds()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        late_s = self._lag.seconds() - self._seen_s
        if late_s > 0 and self._timer is not None:
            # What came meanwhile is still to be looked at, so at least a moment is left.
            left_s = max(late_s - (self._loop.time() - self._timer.when()), TICK_S)
            self._moved(late_s)
            self.reschedule(left_s)
        else:
            self._timeout.reschedule(self._loop.time())

    def expired(self) -> bool:
        """Return whether the limit was reached."""
        return self._timeout.expired()

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lag.leave()
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)
