"""The crew of a run gives episodes to its workers, replaces workers that die, and plays lost episodes again.

Rules, which are the same for every kind of worker:

1. An episode goes to the least busy worker that is alive. A worker that dies is replaced.
2. An episode whose worker died is played again with the same seeds, so its record is the same.
3. An episode that was lost twice is played a last time, in a worker of its own: if it kills that one, too,
   then it killed the others, and not an episode beside it. It is then recorded as aborted at the boundary
   `worker`, and the run goes on.
4. Only one attempt at an episode is awaited at a time, so an episode has one record.
5. A worker whose event loop is blocked for longer than the run's limits allow is killed, so it has died.
6. The completions of episodes that run long are kept here, so that a lost one goes on with the same tokens.
7. A worker in which many threads hang in calls that were given up gets no further episodes, before it would
   have to refuse calls. Another one takes its place at once, and it ends with the last of its episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from agentenv.core.errors import AgentEnvError, UsageError
from agentenv.core.trajectory import EpisodeError, StopReason, Trajectory
from agentenv.core.visible import logger
from agentenv.engine.interface import Completion
from agentenv.envs.spec import EnvSpec
from agentenv.runner.stage import Stage
from agentenv.runner.watchdog import Ledger
from agentenv.tools.run import MAX_ABANDONED
from agentenv.workers.crew_stage import CrewStage
from agentenv.workers.episode_worker import Order, OrderKey, Played
from agentenv.workers.reports import Reports, Tell, stats_of
from agentenv.workers.servers import ServerShares
from agentenv.workers.silence import Watch
from agentenv.workers.worker import ClusterLost, Worker, WorkerLost

__all__ = ["Crew"]

_T = TypeVar("_T")
_log = logger(__name__)

MAX_REPLAYS = 2
"""Times that an episode whose worker died is played again; the last time it has a worker of its own."""
MAX_STARTS = 3
"""Attempts in a row at replacing a worker, after which it stays away."""
MAX_HANGING = MAX_ABANDONED // 2
"""Number of hung threads with which a worker gets no further episodes; those that it has may hang more."""
TELL_EVERY_S = 10.0
"""Time between two notices of what the crew waits for."""


@dataclass(slots=True)
class _Slot:
    """A worker of the crew, or the one that is to replace it."""

    # Invariant: `worker` is None exactly while a replacement is being started, or if it cannot be started.
    worker: Worker | None = None
    busy: int = 0
    """Number of episodes of the worker."""
    leaving: bool = False
    """Whether the worker gets no further episodes; it is then in `_leaving`, and another has its place."""


class Crew:
    """Plays episodes on several workers; `async with` starts and ends them, and may be entered again.

    Args:
        hire: makes a worker from its name; the second argument is true for a spare one.
        num_workers: number of workers.
        specs: the environments of the recipe, in its order.
        tell: called from time to time with how the driver and each worker are doing.
        num_servers: number of servers of the engine, over which the episodes are spread evenly.
        tell_servers: called from time to time with how each of these servers is doing.
        beside: open while the crew is, such as the watch over a cluster's head.
    """

    # Invariant: `_slots` has `num_workers` entries while the crew is open. `_changed` is notified whenever
    # a slot gets its worker, or loses the hope for one.

    def __init__(
        self,
        hire: Callable[[str, bool], Worker],
        num_workers: int,
        specs: Sequence[EnvSpec],
        tell: Tell | None = None,
        *,
        num_servers: int = 0,
        tell_servers: Tell | None = None,
        beside: AbstractAsyncContextManager[object] | None = None,
    ) -> None:
        self.num_workers = num_workers
        self.servers = ServerShares(num_servers)
        self.lost = 0
        """Number of times that a worker died while it played an episode, counted for each episode."""
        self.replayed = 0
        """Number of times that a lost episode was played again."""
        self.kept = 0
        """Number of turns of lost episodes that need not be sampled again."""
        self.deaths = 0
        """Number of workers that died."""
        self.retired = 0
        """Number of workers that got no further episodes, because threads hung in them."""
        self.done = 0
        """Number of finished episodes."""
        self._reports = None if tell is None else Reports(self.stats, self._counts, tell, tell_servers)
        self._hire = hire
        self._beside = beside or nullcontext()
        self._specs = specs
        self._names = 0
        self._stages = 0
        self._slots: list[_Slot] = []
        self._leaving: list[_Slot] = []
        self._spare: list[Worker] = []
        """Idle workers beside the places, each for one episode that was lost twice."""
        self._replacing: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._watch = Watch(self._collect)
        self._turns: dict[OrderKey, dict[str, Completion]] = {}
        """The completions so far of each running episode that is long."""
        self._failure: AgentEnvError | None = None
        self._weights: tuple[int, str] | None = None
        self._encoded: dict[tuple[str, str, int], object] = {}
        self._spent: dict[str, Mapping[str, float]] = {}
        """What each worker had spent when it last finished an episode, by its name."""

    async def __aenter__(self) -> Self:
        """Start the workers.

        Raises:
            UsageError: The recipe cannot be opened in a worker.
            WorkerLost: A worker died while it started.
            ClusterLost: The cluster has gone.
        """
        # Made here, because they belong to the event loop on which they are used.
        self._alone, self._changed = asyncio.Semaphore(self.num_workers), asyncio.Condition()
        self._failure = None
        await self._beside.__aenter__()
        starts = [asyncio.create_task(self._one_of_the_first()) for _ in range(self.num_workers)]
        started = asyncio.gather(*starts)
        try:
            self._slots = [_Slot(worker) for worker in await self._told(started, self.num_workers)]
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            there = [start.result() for start in starts if not start.cancelled() and not start.exception()]
            await asyncio.gather(*map(self._close, there))
            await self._beside.__aexit__(None, None, None)
            raise
        if self._reports is not None:
            await self._reports.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the workers, and wait until their environments are closed."""
        if self._reports is not None:
            await self._reports.__aexit__()
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, *self._closing, return_exceptions=True)
        workers = self._workers()
        self._slots, self._leaving, self._spare = [], [], []
        await asyncio.gather(*map(self._close, workers))
        await self._beside.__aexit__(None, None, None)

    def stage(self, stage: Stage, ledger: Ledger) -> CrewStage:
        """Return what plays the episodes of a stage on this crew; see `agentenv.runner.groups`.

        Raises:
            UsageError: The workers do not know the environment.
        """
        indices = [index for index, spec in enumerate(self._specs) if spec is stage.spec]
        if not indices:
            raise UsageError(
                f"the workers of this run do not know {stage.spec.id}",
                remedy="name all environments when the run begins",
            )
        self._stages += 1
        self._watch.allow(stage.rules.limits)
        return CrewStage(self, stage, ledger, number=self._stages, env=indices[0])

    def encoded(self, trajectory: Trajectory) -> Any:
        """Return, once, what the worker made of a record for the driver; None if it made nothing."""
        return self._encoded.pop((trajectory.env_id, trajectory.group_id, trajectory.member), None)

    def spent(self) -> dict[str, float]:
        """Return what all workers have spent, those that died included; see `Features.metrics`."""
        names = dict.fromkeys(name for each in self._spent.values() for name in each)
        return {name: sum(each.get(name, 0.0) for each in self._spent.values()) for name in names}

    async def expect_weights(self, version: int, run: str = "") -> None:
        """Tell all workers, and those that replace them, which weights the engine's servers have now.

        Args:
            version: version of the weights.
            run: the training that pushed them; empty if it has no name.
        """
        self._weights = version, run
        await asyncio.gather(*(worker.expect_weights(version, run) for worker in self._workers()))

    async def stats(self) -> list[dict[str, Any]]:
        """Return how each worker is doing, or that it is silent; those being replaced are left out."""
        rows = await asyncio.gather(*map(stats_of, self._workers()))
        return [row for row in rows if row]

    def summary(self) -> str:
        """Return in a few words how many workers are alive, and what died so far."""
        alive = sum(slot.worker is not None for slot in self._slots)
        kept = f" with {self.kept} of their turns" if self.kept else ""
        died = f", {self.deaths} died, {self.replayed} episodes played again{kept}" if self.deaths else ""
        retired = f", {self.retired} replaced because of hung threads" if self.retired else ""
        return f"{alive}/{self.num_workers} workers{died}{retired}"

    def server_rows(self) -> list[dict[str, Any]]:
        """Return how the engine's servers were doing when the workers were last asked."""
        return [] if self._reports is None else self._reports.servers

    def _counts(self) -> dict[str, int]:
        live = sum(slot.busy for slot in (*self._slots, *self._leaving))
        counts = {"live": live, "done": self.done, "lost": self.lost, "replayed": self.replayed}
        return {**counts, "deaths": self.deaths, "retired": self.retired}

    async def play(self, order: Order, env_id: str) -> Trajectory:
        """Play one episode and return its record, whichever workers die meanwhile.

        Raises:
            AgentEnvError: All workers died, and none can be replaced.
            ClusterLost: The cluster has gone.
        """
        self._turns[order.key] = {}
        try:
            return await self._played(order, env_id)
        finally:
            del self._turns[order.key]

    async def _played(self, order: Order, env_id: str) -> Trajectory:
        lost: WorkerLost | None = None
        for attempt in range(1 + MAX_REPLAYS):
            self.replayed += attempt > 0
            order = replace(order, kept=dict(self._turns[order.key]))
            self.kept += len(order.kept)
            lent = self._lone_worker() if attempt == MAX_REPLAYS else self._least_busy()
            try:
                async with lent as worker:
                    played = await worker.play(order)
                    if played.hanging >= MAX_HANGING:
                        self._retire(worker, played.hanging)
            except WorkerLost as error:
                self.lost += 1
                lost = error
            else:
                self._spent[worker.name] = played.spent
                return self._kept(played)
        assert lost is not None
        return _aborted(order, env_id, lost)

    async def _collect(self, worker: Worker) -> None:
        """Keep what the long episodes of a worker have had by now."""
        for key, turns in (await worker.turns()).items():
            if key in self._turns:
                self._turns[key].update(turns)

    def _kept(self, played: Played) -> Trajectory:
        record = played.record
        self.done += 1
        if played.encoded is not None:
            self._encoded[record.env_id, record.group_id, record.member] = played.encoded
        return record

    # Workers ------------------------------------------------------------------------------

    def _workers(self) -> list[Worker]:
        """Return all workers that are alive."""
        slots = (*self._slots, *self._leaving)
        return [*(slot.worker for slot in slots if slot.worker is not None), *self._spare]

    @asynccontextmanager
    async def _least_busy(self) -> AsyncGenerator[Worker]:
        """Lend the worker with the fewest episodes; wait if all are being replaced."""
        lent = self._alive()
        slot, worker = lent if lent is not None else await self._wait_for_one()
        slot.busy += 1
        try:
            yield worker
        except WorkerLost as error:
            self._replace(slot, worker, error)
            raise
        finally:
            if slot.worker is worker:
                slot.busy -= 1
                if slot.leaving and not slot.busy:
                    self._leave(slot, worker)

    def _alive(self) -> tuple[_Slot, Worker] | None:
        """Return the least busy slot with its worker; None if no worker is alive."""
        alive = [(slot, slot.worker) for slot in self._slots if slot.worker is not None]
        return min(alive, key=lambda lent: lent[0].busy) if alive else None

    async def _wait_for_one(self) -> tuple[_Slot, Worker]:
        async with self._changed:
            while (lent := self._alive()) is None:
                if not self._replacing:
                    raise self._failure or AgentEnvError("this crew is not open")
                await self._changed.wait()
            return lent

    @asynccontextmanager
    async def _lone_worker(self) -> AsyncGenerator[Worker]:
        """Lend a worker that plays nothing else."""
        async with self._alone:
            worker = self._spare.pop() if self._spare else await self._another(beside=True)
            try:
                yield worker
            except WorkerLost:
                self.deaths += 1
                await self._close(worker)
                raise
            except BaseException:
                await self._close(worker)
                raise
            self._spare.append(worker)

    def _replace(self, slot: _Slot, dead: Worker, error: WorkerLost) -> None:
        """Start another worker for a slot; does nothing if another episode of the dead one did so."""
        if slot.worker is not dead:
            return
        self.deaths += 1
        _log.warning("%s; its episodes are played again", error)
        if slot.leaving:
            self._leave(slot, dead)
            return
        slot.worker, slot.busy = None, 0
        self._do(self._fill(slot, dead), self._replacing)

    def _retire(self, worker: Worker, hanging: int) -> None:
        """Give a worker no further episodes, and start another one in its place."""
        for index, slot in enumerate(self._slots):
            if slot.worker is worker:
                _log.warning(
                    "%d threads of worker %s hang in calls that were given up; another one takes its place",
                    hanging,
                    worker.name,
                )
                self.retired += 1
                slot.leaving = True
                self._leaving.append(slot)
                self._slots[index] = _Slot()
                self._do(self._fill(self._slots[index]), self._replacing)

    def _leave(self, slot: _Slot, worker: Worker) -> None:
        """Close a worker that plays nothing any more and whose place another one has."""
        self._leaving.remove(slot)
        slot.worker, slot.busy = None, 0
        self._do(self._close(worker), self._closing)

    def _do(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _fill(self, slot: _Slot, dead: Worker | None = None) -> None:
        try:
            if dead is not None:
                await self._close(dead)
            slot.worker = await self._told(self._another(), 1)
        except AgentEnvError as error:
            self._failure = error
            if not isinstance(error, ClusterLost):  # which ends the run, and is told there
                _log.warning("%s", error)
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._replacing.discard(task)
            async with self._changed:
                self._changed.notify_all()

    async def _one_of_the_first(self) -> Worker:
        """Start a worker of a run that begins.

        One that dies meanwhile is started again: a cluster may take seconds to notice that a node is gone.

        Raises:
            UsageError: The recipe cannot be opened there.
            WorkerLost: It died several times.
        """
        for _ in range(MAX_STARTS - 1):
            try:
                return await self._started()
            except WorkerLost as error:
                _log.warning("%s; another one is started", error)
        return await self._started()

    async def _another(self, *, beside: bool = False) -> Worker:
        """Start another worker; what makes it fail may pass, so this is tried several times.

        Raises:
            AgentEnvError: It cannot be started.
        """
        failures: list[AgentEnvError] = []
        for _ in range(MAX_STARTS):
            try:
                return await self._started(beside=beside)
            except ClusterLost:
                raise
            except AgentEnvError as error:
                failures.append(error)
        raise AgentEnvError(
            f"a worker died and cannot be replaced, after {MAX_STARTS} attempts: {failures[-1]}"
        )

    async def _started(self, *, beside: bool = False) -> Worker:
        """Start a worker under a name that no other worker of the run had."""
        self._names += 1
        worker = self._hire(f"w{self._names}", beside)
        try:
            await worker.start()
            if self._weights is not None:
                await worker.expect_weights(*self._weights)
        except BaseException:
            await worker.close()
            raise
        self._watch.begin(worker)
        return worker

    async def _close(self, worker: Worker) -> None:
        await self._watch.end(worker)
        await worker.close()

    async def _told(self, starting: Awaitable[_T], number: int) -> _T:
        """Await the start of workers, and say in the log from time to time that it is awaited."""
        future = asyncio.ensure_future(starting)
        began = asyncio.get_running_loop().time()
        try:
            while True:
                done, _ = await asyncio.wait({future}, timeout=TELL_EVERY_S)
                if done:
                    return future.result()
                waited = asyncio.get_running_loop().time() - began
                _log.warning("%d workers have been starting for %.0f s", number, waited)
        finally:
            future.cancel()


def _aborted(order: Order, env_id: str, lost: WorkerLost) -> Trajectory:
    """Return the record of an episode that killed every worker that played it."""
    times = 1 + MAX_REPLAYS
    message = f"the worker that played this episode died {times} times, the last time alone with it: {lost}"
    error = EpisodeError("worker", type(lost).__name__, message)
    job: Any = order.job
    return Trajectory(
        env_id=env_id,
        task_id=job.task_id,
        seed=job.seed,
        group_id=job.group_id,
        stop_reason=StopReason.ABORTED,
        member=order.member,
        error=error,
        untrainable_reason=f"failed at {error.boundary}: {error.type}: {error.message}",
        task=job.task,
    )
