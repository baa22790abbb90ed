"""Play groups as a stream: each step takes the first that finish, and new ones begin as soon as they may.

Rules:

1. While n steps are done, at most `(n + max_ahead + 1) * groups_per_step` groups have begun (AReaL, arXiv
   2505.24298, equation 3). Extra groups of refills do not count.
2. A group that began when n steps were done is trained when at most `n + max_ahead` are done: a step waits
   for those unfinished groups without which a later step would break this rule. Nothing is left out for
   being long, which would train long episodes less often than others.
3. Every group that was dealt is trained once. A checkpoint names the groups that were dealt and not trained;
   a resumed run deals them first, with the same tasks, ids and seeds.

In a launch of several processes all deal the same groups, and each plays and trains its share of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentenv.core.episode_env import Task
from agentenv.core.errors import UsageError
from agentenv.core.seats import game_of
from agentenv.core.trajectory import TrajectoryGroup
from agentenv.runner.groups import JobFeed
from agentenv.runner.plan import Job, jobs_of
from agentenv.training.loop.event_loop import beside_the_loop
from agentenv.training.loop.mixture import DealtGroup, TaskPosition
from agentenv.training.loop.rollouts import Rollouts

__all__ = ["GroupStream", "StreamBatch"]


@dataclass(slots=True)
class _StreamedGroup:
    """A group that was dealt and not trained."""

    dealt: DealtGroup
    number: int
    """Number of the group in the order of dealing."""
    owner: int
    """Index of its environment in the mixture."""
    rank: int
    """The process that plays it."""
    task: Task
    job: Job
    born: int | None = None
    """Number of steps that were done when it began; None before that."""
    began: float = 0.0
    finished: float = 0.0
    groups: list[TrajectoryGroup] | None = None
    """The played group, with those of further seats; None before it is finished."""


class StreamBatch:
    """The groups that one step takes from the stream; awaiting it waits until they can be taken.

    Args:
        stream: where the groups come from.
    """

    def __init__(self, stream: GroupStream) -> None:
        self._stream = stream
        self._taken: list[_StreamedGroup] = []
        self.groups: tuple[TrajectoryGroup, ...] = ()
        self.metrics: dict[str, float] = {}

    def __await__(self) -> Generator[Any, None, None]:
        return self._take().__await__()

    async def _take(self) -> None:
        taken, waited = await self._stream.take()
        now = time.perf_counter()
        self._taken = taken
        self.groups = tuple(played for group in taken for played in group.groups or ())
        self.metrics = {
            "time/rollout": max((group.finished - group.began for group in taken), default=0.0),
            "time/wait/staleness": waited,
            "time/ready": sum(now - group.finished for group in taken) / max(1, len(taken)),
            **self._stream.gauges(),
        }

    def trained(self, gather: Callable[[Sequence[Any]], Sequence[Any]]) -> TaskPosition:
        """Return the position without the groups that the step took."""
        return self._stream.without(gather([group.number for group in self._taken]))


class GroupStream:
    """Deals, plays and hands out groups; see the rules above.

    Args:
        rollouts: plays the groups.
        position: where the run is in its tasks; its untrained groups are dealt first.
    """

    # Invariant: each group that was dealt and not trained is in `_open`; until it may begin, its number is
    # also in `_held`. All processes have the same groups in `_open`, with the same numbers and ranks.

    def __init__(self, rollouts: Rollouts, position: TaskPosition) -> None:
        self._rollouts, self._config = rollouts, rollouts.config
        self._grpo, self._world = rollouts.grpo, rollouts.learner.world
        self._steps = self._grpo.steps_done
        """Number of steps whose weights the engine has."""
        self._cursors = dict(position.cursors)
        self._rounds = max(position.rounds, self._steps * (1 + self._config.sampling.refill_rounds))
        self._open: dict[int, _StreamedGroup] = {}
        self._by_id: dict[str, _StreamedGroup] = {}
        self._held: deque[int] = deque()
        self._dealt = 0
        self._slots_dealt = self._slots_used = 0
        """Slots are the groups that rule 1 counts. They go round the processes in turn."""
        self._released = 0
        self._gone: Sequence[int] = ()
        self._wanted = 0
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._feeds = [JobFeed(self._begun) for _ in rollouts.mixture.specs]
        self._tasks: set[asyncio.Task[None]] = set()
        # Before anything new, so that a run that was killed trains its groups in the order of their dealing.
        for dealt in position.untrained:
            self._add_again(dealt)
        rollouts.stop_at_the_end(self)
        for owner in range(len(rollouts.mixture.specs)):
            self._start(self._play(owner))
        self._deal(0)

    @property
    def _size(self) -> int:
        return self._config.sampling.num_generations

    # For the training ---------------------------------------------------------------------

    def begin(self, step: int) -> StreamBatch:
        """Return the batch of a step, whose groups began when the steps before it were done."""
        return StreamBatch(self)

    def refill(self) -> bool:
        """Return False: awaiting the batch refills it too."""
        return False

    async def take(self) -> tuple[list[_StreamedGroup], float]:
        """Wait for the groups of a step, and for the further groups that a refill needs.

        Returns:
            The groups, and the seconds for which there were enough but unfinished ones had to come first.

        Raises:
            BaseException: Playing failed.
        """
        config = self._config
        self._wanted = config.sampling.groups_per_step
        batch, waited = await self._finished()
        for _ in range(config.sampling.refill_rounds):
            # Beside the loop, because it computes advantages, and the processes wait for each other in it.
            count = partial(
                self._grpo.count_mixed, [played for group in batch for played in group.groups or ()]
            )
            missing = config.sampling.groups_per_step - await beside_the_loop(count)
            if missing <= 0:
                break
            self._wanted += missing
            self._deal(self._wanted - config.sampling.groups_per_step)
            batch, longer = await self._finished()
            waited += longer
        # In the order of dealing: that of finishing would make sums differ in their last digits.
        return sorted(batch, key=lambda group: group.number), waited

    def go_on(self) -> bool:
        """Return True: the stream is played while the batch trains."""
        return True

    def without(self, taken: Sequence[int]) -> TaskPosition:
        """Return the position without these groups, which `stepped` then forgets.

        This may be called in another thread than that of the event loop.
        """
        self._gone = taken
        untrained = tuple(group.dealt for number, group in self._open.items() if number not in taken)
        return TaskPosition(dict(self._cursors), self._rounds, untrained)

    def stepped(self) -> TaskPosition:
        """Begin the groups that the new step allows, and return the position with them."""
        for number in self._gone:
            del self._by_id[self._open.pop(number).dealt.group_id]
        self._slots_used += self._wanted
        self._steps = self._grpo.steps_done
        self._deal(0)
        return self.without(())

    def gauges(self) -> dict[str, float]:
        """Return how many groups of this process are played, wait for room, and wait for the trainer."""
        own = [group for group in self._open.values() if group.rank == self._world.rank]
        return {
            "stream/playing": float(sum(group.born is not None and group.groups is None for group in own)),
            "stream/queued": float(
                sum(group.born is None and group.number not in self._held for group in own)
            ),
            "stream/finished": float(sum(group.groups is not None for group in own)),
        }

    # Dealing ------------------------------------------------------------------------------

    def _deal(self, extra: int) -> None:
        """Deal and begin as many groups as rule 1 allows, with `extra` ones for the refills of this step."""
        config = self._config
        # No more than the run still trains: the last steps would leave groups that were played for nothing.
        steps = min(config.stream.max_ahead + 1, config.max_steps - self._steps)
        limit = self._slots_used + steps * config.sampling.groups_per_step + extra
        while self._slots_dealt < limit:
            count = min(config.sampling.groups_per_step, limit - self._slots_dealt)
            slots = range(self._slots_dealt, self._slots_dealt + count)
            self._slots_dealt += count
            self._deal_round(count, [slot % self._world.size for slot in slots])
        while self._held and self._released < limit:
            self._released += 1
            self._release(self._open[self._held.popleft()])

    def _deal_round(self, count: int, ranks: Sequence[int]) -> None:
        mixture, seed = self._rollouts.mixture, self._config.seed
        self._rounds += 1
        dealt, self._cursors = mixture.deal(count, seed=seed, round_index=self._rounds, cursors=self._cursors)
        # All processes deal everything, so that they agree on it without a message, and play their own part.
        for drawn, rank in zip(dealt, ranks, strict=True):
            job = self._job(drawn.owner, drawn.task, self._rounds, drawn.repeat)
            name = mixture.names[drawn.owner]
            group = DealtGroup(name, drawn.cursor, self._rounds, drawn.repeat, job.group_id)
            self._add(group, drawn.owner, rank, drawn.task, job)

    def _add_again(self, dealt: DealtGroup) -> None:
        """Deal a group that an earlier run dealt and did not train."""
        mixture = self._rollouts.mixture
        if dealt.env not in mixture.names:
            raise UsageError(
                f"the checkpoint has groups of {dealt.env} to train on, which is not among the environments",
                remedy="go on with the environments of the run",
            )
        owner = mixture.names.index(dealt.env)
        task = mixture.task_at(owner, seed=self._config.seed, cursor=dealt.cursor)
        job = self._job(owner, task, dealt.round_index, dealt.repeat)
        # The id is made of the task's content. Another task under the old id would be trained as if it were
        # the one that the checkpoint names.
        if job.group_id != dealt.group_id:
            raise UsageError(
                f"the checkpoint has the group {dealt.group_id} to train on, but its task is now that of "
                f"{job.group_id}",
                remedy="go on with the tasks and the seed of the run",
            )
        rank = self._slots_dealt % self._world.size
        self._slots_dealt += 1
        self._add(dealt, owner, rank, task, job)

    def _job(self, owner: int, task: Task, round_index: int, repeat: int) -> Job:
        spec = self._rollouts.mixture.specs[owner]
        return next(jobs_of([task], spec.id, self._config.seed, round_index, [repeat]))

    def _add(self, dealt: DealtGroup, owner: int, rank: int, task: Task, job: Job) -> None:
        group = _StreamedGroup(dealt, self._dealt, owner, rank, task, job)
        self._open[group.number] = self._by_id[job.group_id] = group
        self._held.append(group.number)
        self._dealt += 1

    # Playing ------------------------------------------------------------------------------

    def _release(self, group: _StreamedGroup) -> None:
        """Let a group begin, if this process plays it, as soon as there is room for its episodes."""
        if group.rank == self._world.rank:
            self._feeds[group.owner].put(group.job)

    def _begun(self, job: Job) -> None:
        group = self._by_id[job.group_id]
        group.born, group.began = self._steps, time.perf_counter()

    def _end(self, group: _StreamedGroup, played: list[TrajectoryGroup]) -> None:
        group.groups, group.finished = played, time.perf_counter()
        self._changed.set()

    async def _play(self, owner: int) -> None:
        """Play the groups of one environment."""
        rollouts = self._rollouts
        keep, spec = rollouts.options.callbacks.on_trajectory, rollouts.mixture.specs[owner]
        jobs = rollouts.runner.run_groups(spec, self._feeds[owner], self._size, on_trajectory=keep)
        seats: list[TrajectoryGroup] = []
        async with aclosing(jobs) as played:
            async for group in played:
                seats.append(group)
                if group.group_id != game_of(group.group_id):
                    continue  # the groups of further seats come right before that of their game
                groups, seats = seats, []
                self._end(self._by_id[group.group_id], groups)

    def _start(self, play: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(play)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._changed.set()

    @property
    def done(self) -> bool:
        """Whether nothing is played any more."""
        return not self._tasks

    async def stop(self) -> None:
        """Cancel the running episodes, and wait until their environments are closed."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Taking -------------------------------------------------------------------------------

    async def _finished(self) -> tuple[list[_StreamedGroup], float]:
        """Wait until a batch can be taken; return it and the seconds that rule 2 alone made it wait."""
        waited = 0.0
        while True:
            self._changed.clear()
            batch, enough = self._choose()
            if batch is not None:
                return batch, waited
            began = time.perf_counter()
            await self._changed.wait()
            waited += time.perf_counter() - began if enough else 0.0

    def _choose(self) -> tuple[list[_StreamedGroup] | None, bool]:
        """Return this process's part of the batch, and whether enough groups are finished.

        The part is None if it must wait, for more groups or because of rule 2.
        """
        if self._error is not None:
            raise self._error
        own = [group for group in self._open.values() if group.rank == self._world.rank]
        ready = [group for group in own if group.groups is not None]
        ready.sort(key=lambda group: (group.born, group.number))
        quota = len(self._slots_of_this_process(self._slots_used, self._wanted))
        unfinished = [group for group in own if group.groups is None and group.number not in self._held]
        if len(ready) < quota and unfinished:
            return None, False
        # What has not begun cannot be late, because it begins with the newest weights.
        begun = [group for group in unfinished if group.born is not None]
        if self._breaks_the_bound(begun, ready[quota:]):
            return None, True
        return ready[:quota], True

    def _breaks_the_bound(
        self, unfinished: Sequence[_StreamedGroup], ready: Sequence[_StreamedGroup]
    ) -> bool:
        """Return whether one of these groups would be trained too late, and waiting can change that.

        Later steps take the groups in the order in which they began. The group of index i then has the place
        of slot i among those of this process, which tells its step.
        """
        config, first = self._config, self._slots_used + self._wanted
        left = sorted([*unfinished, *ready], key=lambda group: (group.born, group.number))
        slots = self._slots_of_this_process(first, len(left) * self._world.size)
        may_change = False
        for group, slot in zip(left, slots, strict=False):
            may_change |= group.groups is None
            trained_at = self._steps + 1 + (slot - first) // config.sampling.groups_per_step
            if may_change and trained_at > (group.born or 0) + config.stream.max_ahead:
                return True
        return False

    def _slots_of_this_process(self, first: int, count: int) -> range:
        rank, size = self._world.rank, self._world.size
        return range(first + (rank - first) % size, first + count, size)
