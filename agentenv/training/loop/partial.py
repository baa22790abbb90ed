"""Partial rollouts: a step plays each episode for some turns, and unfinished episodes go on in the next step.

Rules:

1. `groups_per_step` groups are under way. A step lets each unfinished episode play at most `partial_turns`
   more turns, and takes the groups whose members have all finished. If there is none, it plays on with the
   same weights.
2. A paused episode is kept as its record. When it goes on, a new environment plays the recorded turns again
   and must answer as it did; otherwise the episode is aborted. Each token keeps the log-probability and the
   version of the weights that sampled it.
3. A checkpoint holds the records of the groups under way, so that a resumed run plays no turn that it had
   played before. Nothing depends on timing.

Kimi k1.5 (arXiv 2501.12599) gives each episode a number of tokens for a step, where this
module counts turns. slime and APRIL (arXiv 2509.18521) start more episodes than they need and interrupt the
rest when enough have finished, which depends on timing; a stream (`loop.stream`) is the counterpart of
that and interrupts nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from agentenv.core.errors import UsageError
from agentenv.core.task import Task
from agentenv.core.trajectory import StopReason, Trajectory, TrajectoryGroup
from agentenv.runner.options import GroupPolicy
from agentenv.runner.plan import Branch, Job, jobs_of
from agentenv.runner.stage import Stage
from agentenv.training.loop.place import DealtGroup, Place, UnfinishedGroup
from agentenv.training.loop.rollouts import Rollouts

__all__ = ["PartialBatch", "PartialBatches"]


@dataclass(slots=True)
class _Open:
    """A group under way."""

    dealt: DealtGroup
    owner: int
    """Index of its environment in the mixture."""
    job: Job
    members: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])
    """The latest record of each member, paused or finished."""

    def unfinished(self, size: int) -> list[int]:
        """Return the members that have not finished."""
        records = ((member, self.members.get(member)) for member in range(size))
        return [member for member, one in records if one is None or one.stop_reason is StopReason.PAUSED]


class PartialBatch:
    """The groups that a step takes; awaiting it plays until there is one.

    Args:
        batches: where the groups come from.
    """

    def __init__(self, batches: PartialBatches) -> None:
        self._batches = batches
        self.groups: tuple[TrajectoryGroup, ...] = ()
        self.metrics: dict[str, float] = {}

    def __await__(self) -> Generator[Any, None, None]:
        return self._play().__await__()

    async def _play(self) -> None:
        began = time.perf_counter()
        self.groups = await self._batches.finished()
        self.metrics = {
            "time/rollout": time.perf_counter() - began,
            "time/wait/staleness": 0.0,
            "partial/paused": float(self._batches.num_paused),
        }

    def trained(self, gather: Callable[[Sequence[Any]], Sequence[Any]]) -> Place:
        """Return the place of the run without the groups that the step took."""
        return self._batches.without({group.group_id for group in self.groups})


class PartialBatches:
    """Deals groups and plays them in slices; see the rules above.

    Args:
        rollouts: plays the episodes.
        place: the place of the run; its unfinished groups go on first.

    Raises:
        UsageError: Another option of the run excludes partial rollouts, or its environments have changed.
    """

    def __init__(self, rollouts: Rollouts, place: Place) -> None:
        self._rollouts, self._config = rollouts, rollouts.config
        self._slice = rollouts.config.partial_turns or 0
        _refuse_what_does_not_fit(rollouts)
        self._cursors, self._rounds = dict(place.cursors), max(place.rounds, rollouts.grpo.steps_done)
        self._open = [self._again(group) for group in place.unfinished]

    def begin(self, step: int) -> PartialBatch:
        """Deal groups until there are enough under way, and return the batch of the step."""
        config, mixture = self._config, self._rollouts.mixture
        if missing := config.groups_per_step - len(self._open):
            self._rounds += 1
            dealt, self._cursors = mixture.deal(
                missing,
                seed=config.seed,
                round_index=self._rounds,
                cursors=self._cursors,
                left_out=self._rollouts.left_out,
            )
            for one in dealt:
                job = self._job(one.owner, one.task, self._rounds, one.repeat)
                name = mixture.names[one.owner]
                place = DealtGroup(name, one.cursor, self._rounds, one.repeat, job.group_id)
                self._open.append(_Open(place, one.owner, job))
        return PartialBatch(self)

    def refill(self) -> bool:
        """Return False: the groups under way are not refilled."""
        return False

    def go_on(self) -> bool:
        """Return False: nothing is played while a batch trains."""
        return False

    def stepped(self) -> None:
        """Begin nothing: the next batch deals what is missing."""

    @property
    def num_paused(self) -> int:
        """Number of episodes that are paused."""
        records = [one for group in self._open for one in group.members.values()]
        return sum(one.stop_reason is StopReason.PAUSED for one in records)

    def without(self, group_ids: set[str]) -> Place:
        """Forget these groups, and return the place with those that are left."""
        self._open = [group for group in self._open if group.job.group_id not in group_ids]
        left = tuple(UnfinishedGroup(group.dealt, tuple(group.members.values())) for group in self._open)
        return Place(dict(self._cursors), self._rounds, unfinished=left)

    # Playing ------------------------------------------------------------------------------

    async def finished(self) -> tuple[TrajectoryGroup, ...]:
        """Play slices until a group is finished, and return the finished groups."""
        size = self._config.num_generations
        while True:
            await self._play_slice(size)
            done = [group for group in self._open if not group.unfinished(size)]
            if done:
                members = [[group.members[member] for member in range(size)] for group in done]
                return tuple(TrajectoryGroup(tuple(each)) for each in members)

    async def _play_slice(self, size: int) -> None:
        rollouts = self._rollouts
        room = asyncio.Semaphore(rollouts.runner.at_once.number)
        async with AsyncExitStack() as stack:
            stages = {
                owner: await stack.enter_async_context(rollouts.runner.stage(rollouts.mixture.specs[owner]))
                for owner in sorted({group.owner for group in self._open})
            }
            tasks = [
                asyncio.ensure_future(self._play(stages[group.owner], group, member, room))
                for group in self._open
                for member in group.unfinished(size)
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(self, stage: Stage, group: _Open, member: int, room: asyncio.Semaphore) -> None:
        """Play the next turns of an episode."""
        before = group.members.get(member)
        turns = 0 if before is None else len(before.turns)
        branch = None if before is None else Branch(before, turns, trained=True)
        async with room:
            job = replace(group.job, branch=branch, pause_at=turns + self._slice)
            record = await stage.play(job, member)
        group.members[member] = record
        keep = self._rollouts.options.on_trajectory
        if keep is not None and record.stop_reason is not StopReason.PAUSED:
            keep(record)

    # Dealing ------------------------------------------------------------------------------

    def _job(self, owner: int, task: Task, round_index: int, repeat: int) -> Job:
        spec = self._rollouts.mixture.specs[owner]
        return next(jobs_of([task], spec.id, self._config.seed, round_index, [repeat]))

    def _again(self, group: UnfinishedGroup) -> _Open:
        """Return a group of a checkpoint."""
        mixture, dealt = self._rollouts.mixture, group.dealt
        owner = mixture.names.index(dealt.env) if dealt.env in mixture.names else None
        if owner is not None:
            task = mixture.task_at(owner, seed=self._config.seed, cursor=dealt.cursor)
            job = self._job(owner, task, dealt.round_index, dealt.repeat)
            if job.group_id == dealt.group_id:
                return _Open(dealt, owner, job, {one.member: one for one in group.members})
        raise UsageError(
            f"the checkpoint has unfinished episodes of {dealt.group_id}, which this run does not deal",
            remedy="go on with the environments, the tasks and the seed of the run",
        )


def _refuse_what_does_not_fit(rollouts: Rollouts) -> None:
    """Refuse what partial rollouts cannot be combined with and the configuration does not know."""
    does_not_fit = {
        f"{rollouts.learner.world.size} processes": rollouts.learner.world.size > 1,
        "a rollout function": rollouts.options.rollout is not None,
        "a group policy": rollouts.runner.options.group_policy != GroupPolicy(),
    }
    for what, is_set in does_not_fit.items():
        if is_set:
            raise UsageError(
                f"partial_turns={rollouts.config.partial_turns} cannot be combined with {what}",
                remedy="leave out one of the two; a stream (max_ahead) also lets episodes go on across steps",
            )
