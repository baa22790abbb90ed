"""Play many episodes at once and yield each group when its last member has finished.

Rules:

1. At most `concurrency` episodes run at once. A task is taken from its source only when there is room, so
   the source may be endless. No new group starts while too many finished groups wait for the consumer.
2. The order in which episodes finish changes neither an episode nor the order of members in a group.
3. When the consumer leaves the loop, and after an error or a cancellation, every environment is closed
   before control returns. Every episode whose record is complete by then has reached `on_trajectory`.
4. A game whose seats the policy plays together gives a group for each seat; that of the game's own episode
   comes last.
5. Members that an earlier run finished are not played again; a group is complete without them.
6. If a `JobFeed` has no job, running episodes go on, and further ones begin once it has one again. If it
   drops a job, the episodes of that job are cancelled and its groups are not yielded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Protocol

from agentenv.core.collector import fewer_collections
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.runner.options import GroupPolicy
from agentenv.runner.plan import Job
from agentenv.runner.stage import Stage
from agentenv.runner.watchdog import Ledger

__all__ = ["Elsewhere", "JobFeed", "NoJobYet", "PlaysJobs", "play_groups"]


@dataclass(slots=True)
class _Group:
    """A group that is being played."""

    # Invariant: `missing` counts the members that are waiting or running, including refills.
    job: Job
    missing: int
    next_member: int
    """Member number of the next refill."""
    played: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])
    seats: dict[str, dict[int, Trajectory]] = field(default_factory=dict[str, dict[int, Trajectory]])
    """Members of the groups of other seats of the same games, by group id."""
    refills: int = 0

    def take(self, member: int, trajectory: Trajectory) -> list[Trajectory]:
        """Take the record of a member, and return it after those of the other seats of its game."""
        others = trajectory.other_seats
        for other in others:
            self.seats.setdefault(other.group_id, {})[member] = other
        self.played[member] = own = replace(trajectory, other_seats=()) if others else trajectory
        return [*others, own]

    def close(self, policy: GroupPolicy) -> list[TrajectoryGroup]:
        """Return the group of each seat; mark those with too few usable members."""
        return [self._group(played, policy) for _, played in sorted(self.seats.items())] + [
            self._group(self.played, policy)
        ]

    @staticmethod
    def _group(played: dict[int, Trajectory], policy: GroupPolicy) -> TrajectoryGroup:
        members = [played[member] for member in sorted(played)]
        group = TrajectoryGroup(tuple(members))
        usable = len(group.usable)
        if usable >= policy.min_usable:
            return group
        why = f"only {usable} of {len(members)} members are usable, fewer than min_usable={policy.min_usable}"
        marked = (
            replace(trajectory, untrainable_reason=why) if trajectory.trainable else trajectory
            for trajectory in members
        )
        return TrajectoryGroup(tuple(marked))


class _InFlight:
    """Holds the running episodes, and starts more while there is room, also while the consumer is busy."""

    # Invariant: a member is in `waiting`, or runs in a task of `running`, or is in its group's `played`.
    # Once `stopping` is set, or `broken` holds an error, no member leaves `waiting`.

    def __init__(
        self,
        stage: PlaysJobs,
        jobs: Iterator[Job],
        *,
        group_size: int,
        policy: GroupPolicy,
        concurrency: int,
        finished: Collection[tuple[str, int]],
        on_trajectory: Callable[[Trajectory], None] | None,
    ) -> None:
        self._stage = stage
        self._jobs = jobs
        self._feed = jobs if isinstance(jobs, JobFeed) else None
        if self._feed is not None:
            self._feed.on_change = self._go_on
        self._group_size = group_size
        self._policy = policy
        self._concurrency = concurrency
        self._finished = finished
        self._on_trajectory = on_trajectory
        self._waiting: deque[tuple[_Group, int]] = deque()
        self._exhausted = False
        self._stopping = False
        self._broken: BaseException | None = None
        self._ready: deque[TrajectoryGroup] = deque()
        # For a slow consumer, at most as many finished groups are kept as could be in flight.
        self._max_ready = max(2, concurrency // group_size)
        self.running: dict[asyncio.Task[Trajectory], _Group] = {}
        self.changed = asyncio.Event()
        """Set whenever an episode has ended or the feed of jobs has changed."""

    @property
    def waits_for_jobs(self) -> bool:
        """Whether further groups may still begin although no episode is running."""
        return self._feed is not None and not self._feed.ended and self._broken is None

    def next_group(self) -> TrajectoryGroup | None:
        """Return a finished group and start more episodes; return None if no group has finished yet.

        Raises:
            BaseException: An exception that the task source or `on_trajectory` raised.
        """
        group = self._ready.popleft() if self._ready else None
        if group is None and self._broken is not None:
            raise self._broken
        self._fill()
        # Filling may break the run too. Running episodes are waited for, because their groups are yielded.
        if group is None and not self.running and self._broken is not None:
            raise self._broken
        self.changed.clear()
        return group

    def _fill(self) -> None:
        """Start episodes while there is room; an error of the task source ends the run."""
        while len(self.running) < self._concurrency and self._broken is None and not self._stopping:
            if not self._waiting and not self._begin_group():
                return
            group, member = self._waiting.popleft()
            recorded: list[Trajectory] = []
            task = asyncio.create_task(self._stage.play(group.job, member, on_record=recorded.append))
            self.running[task] = group
            task.add_done_callback(partial(self._end, group, member, recorded))

    def _begin_group(self) -> bool:
        """Put the members of the next group into `waiting`; return False if there is no next group now."""
        while not self._exhausted and len(self._ready) < self._max_ready:
            try:
                job = next(self._jobs, None)
            except NoJobYet:
                return False
            except BaseException as error:  # noqa: BLE001 - from the caller's iterable; raised in `next_group`
                self._broken = error
                return False
            if job is None:
                self._exhausted = True
                return False
            size = self._group_size
            members = [member for member in range(size) if (job.group_id, member) not in self._finished]
            if members:
                group = _Group(job, len(members), size)
                self._waiting.extend((group, member) for member in members)
                return True
        return False

    def _end(
        self, group: _Group, member: int, recorded: list[Trajectory], task: asyncio.Task[Trajectory]
    ) -> None:
        """Take the record of an episode that has ended, and start more episodes.

        An episode whose record is complete counts as played, also if its task was cancelled after that.
        """
        del self.running[task]
        try:
            if recorded:
                self._take(group, member, recorded[0])
            elif not task.cancelled():
                task.result()  # raises what `play` raised
            elif not self._stopping:
                where = f"member {member} of {group.job.group_id}"
                raise RuntimeError(f"other code cancelled the task of {where}")
        except BaseException as error:  # noqa: BLE001 - from the caller's function or ours; raised in `next_group`
            self._broken = self._broken or error
        self._go_on()

    def _go_on(self) -> None:
        """Start more episodes, and let the consumer look again."""
        self._fill()
        self.changed.set()

    def _take(self, group: _Group, member: int, trajectory: Trajectory) -> None:
        group.missing -= 1
        for record in group.take(member, trajectory):
            if self._on_trajectory is not None:
                self._on_trajectory(record)
        refill = trajectory.stop_reason.failed and self._policy.on_failed == "refill"
        if refill and group.refills < self._policy.max_refills:
            group.refills += 1
            group.missing += 1
            while (group.job.group_id, group.next_member) in self._finished:
                group.next_member += 1
            # To the front, so that a group with a failed member is not finished after all that came later.
            self._waiting.appendleft((group, group.next_member))
            group.next_member += 1
        if not group.missing:
            self._ready.extend(group.close(self._policy))

    async def stop(self) -> None:
        """Cancel the running episodes and wait until their environments are closed."""
        self._stopping = True  # before the tasks end, because each of them would start another episode
        for task in self.running:
            task.cancel()
        while self.running:
            await asyncio.wait(set(self.running))


async def play_groups(
    stage: PlaysJobs,
    jobs: Iterator[Job],
    *,
    group_size: int,
    policy: GroupPolicy,
    concurrency: int,
    finished: Collection[tuple[str, int]] = (),
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> AsyncGenerator[TrajectoryGroup]:
    """Open a stage, play a group for each job on it, and yield the groups as they finish.

    Args:
        stage: plays the members.
        jobs: the groups to play; read lazily. A `JobFeed` may have none for a while.
        group_size: number of members in a group.
        policy: what happens to failed members.
        concurrency: limit of episodes that run at once.
        finished: group id and member number of each episode that an earlier run finished; these are not
            played.
        on_trajectory: called with each episode as soon as it has finished, also in groups that are never
            completed.
    """
    async with stage:
        in_flight = _InFlight(
            stage,
            jobs,
            group_size=group_size,
            policy=policy,
            concurrency=concurrency,
            finished=finished,
            on_trajectory=on_trajectory,
        )
        try:
            with fewer_collections():
                while (
                    (group := in_flight.next_group()) is not None
                    or in_flight.running
                    or in_flight.waits_for_jobs
                ):
                    if group is not None:
                        yield group
                    else:
                        await in_flight.changed.wait()
        finally:
            await in_flight.stop()


class NoJobYet(Exception):
    """There is no job now, but there may be one later."""


class JobFeed:
    """Hands out jobs in the order in which they were put in; a run waits for more until it is closed.

    Args:
        on_start: called with each job when it is taken, which is when its first episode begins.
    """

    def __init__(self, on_start: Callable[[Job], None] | None = None) -> None:
        self._jobs: deque[Job] = deque()
        self._on_start = on_start
        self._closed = False
        self.on_change: Callable[[], None] | None = None
        """Called after a job was put in, and when the feed is closed; the run that reads the feed sets it."""

    @property
    def ended(self) -> bool:
        """Whether the feed is closed and has no job left."""
        return self._closed and not self._jobs

    def put(self, job: Job) -> None:
        """Add a job, which begins as soon as there is room."""
        self._jobs.append(job)
        self._changed()

    def close(self) -> None:
        """Say that no further job comes, so that the run ends after those that were put in."""
        self._closed = True
        self._changed()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def __iter__(self) -> JobFeed:
        return self

    def __next__(self) -> Job:
        if not self._jobs:
            raise StopIteration if self._closed else NoJobYet
        job = self._jobs.popleft()
        if self._on_start is not None:
            self._on_start(job)
        return job


class PlaysJobs(Protocol):
    """What plays single members of groups: a `Stage`, or one that another process holds."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def play(
        self, job: Job, member: int = 0, *, on_record: Callable[[Trajectory], None] | None = None
    ) -> Trajectory:
        """Play one member of a group; see `Stage.play`."""
        ...


class Elsewhere(Protocol):
    """Plays the episodes of a runner in other processes."""

    def stage(self, stage: Stage, ledger: Ledger) -> PlaysJobs:
        """Return what plays the same episodes as a stage of this process.

        Args:
            stage: the stage, which is never opened.
            ledger: counts of the run, in which the episodes are counted.

        Raises:
            UsageError: The stage has an environment that the other processes do not know.
        """
        ...
