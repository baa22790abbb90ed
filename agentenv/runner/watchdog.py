"""Keep the episodes of a run in view: count every outcome, end hung ones, and close what they held.

A time limit cancels code that takes too long. If the code ignores the cancellation, the watchdog ends the
episode without waiting for it, and counts the episode in `abandoned`. Every submitted episode has exactly
one outcome in the `Ledger`.

Rules of closing:

1. Every resource is closed completely, within a time limit, even if the episode is cancelled meanwhile.
2. The same task enters and leaves the context manager of a sandbox pool. The pool can then use timeouts
   and task groups, and an episode that is cancelled returns the sandbox that it had or was about to get.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from agentenv.core.faults import must_pass, traceback_of
from agentenv.core.trajectory import StopReason, Trajectory
from agentenv.core.visible import logger
from agentenv.runner.episode import Episode
from agentenv.runner.fair_timeout import SLACK_S
from agentenv.runner.guard import Boundary, Failure
from agentenv.runner.held_up import LoopWatch

if TYPE_CHECKING:
    from agentenv.core.execution import SandboxProtocol

__all__ = ["Closing", "Lease", "Ledger", "SandboxPool", "Waiting", "Watchdog", "own_pool"]


@dataclass(slots=True)
class Ledger:
    """Episode counts of a run; `balanced` is true at every moment."""

    submitted: int = 0
    """Number of episodes started."""
    outcomes: dict[StopReason, int] = field(default_factory=dict[StopReason, int])
    """Number of finished episodes by stop reason."""
    cancelled: int = 0
    """Number of episodes that the program cancelled."""
    in_flight: int = 0
    """Number of episodes being played."""
    retried: int = 0
    """Number of further attempts after infrastructure failed; these are not extra episodes."""

    def start(self) -> None:
        """Count a submitted episode."""
        self.submitted += 1
        self.in_flight += 1

    def finish(self, trajectory: Trajectory) -> None:
        """Count the outcome of a finished episode, and of those of the other seats of its game."""
        self.in_flight -= 1
        self.submitted += len(trajectory.other_seats)
        for episode in (trajectory, *trajectory.other_seats):
            self.outcomes[episode.stop_reason] = self.outcomes.get(episode.stop_reason, 0) + 1

    def cancel(self) -> None:
        """Count a cancelled episode."""
        self.in_flight -= 1
        self.cancelled += 1

    @property
    def balanced(self) -> bool:
        """True if `submitted` is the sum of the outcomes, `cancelled` and `in_flight`."""
        return self.submitted == sum(self.outcomes.values()) + self.cancelled + self.in_flight


_log = logger(__name__)
_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wait of one episode that is being played."""

    episode_id: str
    boundary: Boundary
    """Part of the system that the episode waits for."""
    seconds: float
    """Length of the wait so far."""


class _Watched:
    """An episode that is being played in a task of its own, and the future of its record."""

    # Invariant: `record` is settled once, by whichever comes first: the end of the task, the watchdog, or
    # a cancellation of the code that awaits it. The task may be abandoned only after that.
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
        boundary = self.episode.guard.boundary
        if task.cancelled():
            # Nobody else cancels this task, so code that the episode ran must have cancelled its own caller.
            self._fail(RuntimeError(f"{boundary}: the code cancelled the task in which the episode runs"))
        elif (error := task.exception()) is not None:
            self.record.set_exception(error)  # the user's interrupt; everything else is in the record
        else:
            self.record.set_result(task.result())

    def abandon(self) -> None:
        """End the episode without waiting for the code any longer."""
        boundary = self.episode.guard.boundary
        self._fail(TimeoutError(f"{boundary}: no answer within its limit, and it ignored its cancellation"))
        self.task.cancel()

    def _fail(self, error: BaseException) -> None:
        """Settle the record as failed, in the part of the system that the episode waited for."""
        self.record.set_result(self.episode.give_up(Failure.of(self.episode.guard.boundary, error)))


class Watchdog:
    """Plays episodes and watches what they wait for.

    Args:
        warn_after_s: log what an episode waits for after this time; None disables the log.
        grace_s: time that code gets to react to its cancellation.
    """

    def __init__(self, *, warn_after_s: float | None, grace_s: float) -> None:
        self.abandoned = 0
        """Number of episodes that were ended although their code was still running."""
        self._warn_after_s = warn_after_s
        self._grace_s = grace_s
        # Invariant: the timer runs exactly while an episode is watched.
        self._watched: dict[str, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop_watch = LoopWatch()  # of the loop on which episodes begin, once one begins

    @property
    def episodes(self) -> list[Episode]:
        """Episodes that are being played."""
        return [watched.episode for watched in self._watched.values()]

    def waiting(self) -> list[Waiting]:
        """Return what the episodes being played wait for, the longest wait first.

        Any thread may call this: it works on a copy, which is made in one step.
        """
        now = time.monotonic()
        guards = ((name, watched.episode.guard) for name, watched in list(self._watched.items()))
        waits = [Waiting(name, guard.boundary, now - guard.since) for name, guard in guards]
        return sorted(waits, key=lambda wait: -wait.seconds)

    @asynccontextmanager
    async def playing(self, name: str, episode: Episode) -> AsyncGenerator[asyncio.Future[Trajectory]]:
        """Play an episode and yield the future of its record.

        The future is settled even if the code that the episode waits for ignores its cancellation.
        """
        watched = self._watched[name] = _Watched(episode)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._look)
            self._loop_watch = LoopWatch.of_running_loop()
            self._loop_watch.start()
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
                self._loop_watch.stop()

    def _look(self) -> None:
        now = time.monotonic()
        # If the loop was held up, the limits that are over meanwhile are looked at first, and put off.
        loop = asyncio.get_running_loop()
        held_up = self._timer is not None and loop.time() - self._timer.when() > SLACK_S
        self._timer = loop.call_later(_PERIOD_S, self._look)
        self._loop_watch.beat()
        if held_up:
            return
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


@runtime_checkable
class SandboxPool(Protocol):
    """Lends sandboxes; every `agentenv.sandbox.Sandbox` is such a pool."""

    def lease(self) -> AbstractAsyncContextManager[SandboxProtocol]:
        """Lend a clean sandbox until the context is left."""
        ...


async def own_pool(name: str | None, stack: AsyncExitStack) -> SandboxPool | None:
    """Open the sandbox named in an environment's spec until the stack closes; return None for no name."""
    if name is None:
        return None
    from agentenv.sandbox.sandbox import create

    return await stack.enter_async_context(create(name))


class Lease:
    """One sandbox of a pool, from `take` to `give_back`.

    Args:
        pool: pool that lends the sandbox.
        timeout_s: time limit with which the episode awaits `take`.
    """

    # Invariant: `take` sets `_lent` and `_keeper` together. `_lent` is pending until the pool answers, then
    # it holds the sandbox or the pool's exception. It is cancelled when nobody waits for a sandbox any more.
    __slots__ = ("_failure", "_keeper", "_lent", "_over", "_pool", "timeout_s")

    def __init__(self, pool: SandboxPool, timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s
        self._pool = pool
        self._over = asyncio.Event()
        self._lent: asyncio.Future[SandboxProtocol] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        """Exception of the pool after it lent the sandbox. It is not raised in the keeper's task, because a
        `SystemExit` in a task ends the event loop."""

    async def take(self) -> SandboxProtocol:
        """Wait for a sandbox; an exception of the pool is raised here."""
        self._lent = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(self._lent))
        return await self._lent

    async def _keep(self, lent: asyncio.Future[SandboxProtocol]) -> None:
        try:
            async with self._pool.lease() as sandbox:
                if not lent.done():
                    lent.set_result(sandbox)
                    await self._over.wait()
        except BaseException as error:  # passed to the waiting episode, whose guard classifies it
            if must_pass(error):
                raise
            if lent.done():
                self._failure = error
            else:
                lent.set_exception(error)
        finally:
            lent.cancel()  # does nothing to a future that is done

    async def give_back(self) -> None:
        """Leave the pool's context, however the episode ended; an exception of the pool is raised here."""
        keeper, lent = self._keeper, self._lent
        if keeper is None or lent is None:
            return
        self._over.set()
        if lent.cancelled():
            # Nobody waits for the sandbox any more, and the pool may not lend it for a long time.
            keeper.cancel()
        try:
            await asyncio.wait({keeper})
        except asyncio.CancelledError:
            keeper.cancel()
            raise
        if self._failure is not None:
            raise self._failure


class Closing:
    """Closes resources of episodes whose records are complete; failures are only logged.

    Args:
        timeout_s: time limit for closing each resource, and then for code to react to its cancellation.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # Invariant: a closing task is in this set until it is done, even if its caller was cancelled. The
        # event loop holds tasks only weakly, and `wait` must find the tasks that nobody awaits.
        self._running: set[asyncio.Task[None]] = set()
        self._abandoned: set[asyncio.Task[BaseException | None]] = set()

    async def close(self, what: str, close: Callable[[], Awaitable[object]]) -> None:
        """Close one resource; whatever its code raises is logged with the resource's name.

        The code runs in a task of its own: if it cancels its caller, or raises a `CancelledError`, then only
        its own task ends, and neither a finished record nor the other resources are lost.
        """
        task = asyncio.create_task(_failure_of(close))
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            _log.warning("closing %s took longer than %g s and was cancelled", what, self._timeout_s)
            await asyncio.wait({task}, timeout=self._timeout_s)
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
        elif task.cancelled():
            _log.warning("closing %s failed: its code cancelled the task in which it ran", what)
        elif (error := task.result()) is not None:
            _log.warning("closing %s failed:\n%s", what, traceback_of(error))

    async def settle(self, closing: Coroutine[object, object, None]) -> None:
        """Run a closing to its end, even if the episode that waits for it is cancelled."""
        task = asyncio.create_task(closing)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    async def wait(self) -> None:
        """Wait for the closings that are still running."""
        while self._running:
            await asyncio.wait(set(self._running))


async def _failure_of(close: Callable[[], Awaitable[object]]) -> BaseException | None:
    """Await a closing and return what its code raised; None if it raised nothing."""
    try:
        await close()
    except BaseException as error:
        if must_pass(error):
            raise
        return error
    return None
