"""Many episodes at once, handed out as groups when their last member is finished.

Rules:

1. At most `concurrency` episodes are in flight; tasks are taken from their source only when there is
   room, so the source may be endless. New groups wait while too many finished ones are not taken.
2. The order in which episodes finish changes nothing in any of them, nor the order in a group.
3. Leaving the loop, an error or a cancellation closes every environment before control returns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from agentenv.core.errors import UsageError
from agentenv.core.trajectory import Trajectory, TrajectoryGroup

__all__ = ["GroupPolicy", "Play", "play_groups"]

_Job = TypeVar("_Job")

Play = Callable[[_Job, int], Awaitable[Trajectory]]
"""Plays one member of a job's group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """What becomes of a group when members fail (aborted or error).

    Raises:
        UsageError: A number is out of range.
    """

    on_failed: Literal["shrink", "refill"] = "shrink"
    """`refill` plays another member for each failed one; the failed ones stay in the group as data."""
    max_refills: int = 2
    """Extra members of one group at most."""
    min_usable: int = 1
    """With fewer usable members the whole group is marked not trainable."""

    def __post_init__(self) -> None:
        if self.on_failed not in {"shrink", "refill"}:
            raise UsageError(f"on_failed must be 'shrink' or 'refill', not {self.on_failed!r}")
        if self.max_refills < 0 or self.min_usable < 0:
            raise UsageError(
                f"max_refills and min_usable must be 0 or more, not {self.max_refills} and {self.min_usable}"
            )

    def check(self, group_size: int) -> None:
        """Check that groups of this size can be what the policy asks for.

        Raises:
            UsageError: They cannot.
        """
        if group_size < 1:
            raise UsageError(f"group_size must be at least 1, not {group_size}")
        if self.min_usable > group_size:
            raise UsageError(f"min_usable is {self.min_usable}, but a group has only {group_size} members")


@dataclass(slots=True)
class _Group(Generic[_Job]):
    job: _Job
    next_member: int
    finished: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])
    refills: int = 0

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.next_member

    def close(self, policy: GroupPolicy) -> TrajectoryGroup:
        members = [self.finished[member] for member in sorted(self.finished)]
        group = TrajectoryGroup(tuple(members))
        usable = len(group.usable)
        if usable >= policy.min_usable:
            return group
        why = f"only {usable} of {len(members)} members are usable, fewer than min_usable={policy.min_usable}"
        marked = (one if not one.trainable else replace(one, untrainable_reason=why) for one in members)
        return TrajectoryGroup(tuple(marked))


class _Pump(Generic[_Job]):
    """Keeps episodes running while there is room, also while the consumer is busy elsewhere."""

    def __init__(
        self,
        jobs: Iterator[_Job],
        play: Play[_Job],
        *,
        group_size: int,
        policy: GroupPolicy,
        concurrency: int,
        on_trajectory: Callable[[Trajectory], None] | None,
    ) -> None:
        self._jobs = jobs
        self._play = play
        self._group_size = group_size
        self._policy = policy
        self._concurrency = concurrency
        self._on_trajectory = on_trajectory
        self._waiting: deque[tuple[_Group[_Job], int]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._exhausted = False
        self._broken: BaseException | None = None
        self._ready: deque[TrajectoryGroup] = deque()
        self._changed = asyncio.Event()
        # Finished groups kept for a slow consumer: as many as could be in flight.
        self._max_ready = max(2, concurrency // group_size)

    def fill(self) -> None:
        """Start episodes while there is room; an error of the task source ends the run."""
        while len(self._running) < self._concurrency and self._broken is None:
            if not self._waiting and not self._next_group():
                return
            group, member = self._waiting.popleft()
            task = asyncio.ensure_future(self._one(group, member))
            self._running.add(task)
            task.add_done_callback(self._done)

    def _next_group(self) -> bool:
        if self._exhausted or len(self._ready) >= self._max_ready:
            return False
        try:
            job = next(self._jobs, None)
        except Exception as error:  # noqa: BLE001 - the caller's iterable: raised to the caller in `take`
            self._broken = error
            return False
        if job is None:
            self._exhausted = True
            return False
        group = _Group(job, self._group_size)
        self._waiting.extend((group, member) for member in range(self._group_size))
        return True

    async def _one(self, group: _Group[_Job], member: int) -> None:
        trajectory = await self._play(group.job, member)
        group.finished[member] = trajectory
        if self._on_trajectory is not None:
            self._on_trajectory(trajectory)
        policy = self._policy
        if (
            trajectory.stop_reason.failed
            and policy.on_failed == "refill"
            and group.refills < policy.max_refills
        ):
            group.refills += 1
            self._waiting.appendleft((group, group.next_member))
            group.next_member += 1
        if group.complete:
            self._ready.append(group.close(policy))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._broken = self._broken or task.exception()
        self.fill()
        self._changed.set()

    async def take(self) -> TrajectoryGroup | None:
        """Return the next finished group, or None at the end."""
        while True:
            if self._ready:
                group = self._ready.popleft()
                self.fill()
                return group
            if self._broken is not None:
                raise self._broken
            self.fill()
            if not self._running:
                if self._broken is not None:
                    raise self._broken
                return None
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> None:
        """Cancel what is running and wait until its environments are closed."""
        self._exhausted = True
        self._waiting.clear()
        for task in self._running:
            task.cancel()
        while self._running:
            await asyncio.wait(set(self._running))


async def play_groups(
    jobs: Iterable[_Job],
    play: Play[_Job],
    *,
    group_size: int,
    policy: GroupPolicy,
    concurrency: int,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> AsyncGenerator[TrajectoryGroup]:
    """Play a group for each job, and yield the groups as they finish.

    Args:
        jobs: what to play; taken lazily.
        play: plays one member; failures of an episode are in what it returns.
        group_size: members of a group.
        policy: what becomes of failed members.
        concurrency: episodes in flight at once.
        on_trajectory: called with each episode at once, also of groups that are never completed.
    """
    pump = _Pump(
        iter(jobs),
        play,
        group_size=group_size,
        policy=policy,
        concurrency=concurrency,
        on_trajectory=on_trajectory,
    )
    try:
        while (group := await pump.take()) is not None:
            yield group
    finally:
        await pump.stop()
