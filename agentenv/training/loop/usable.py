"""End a run that cannot train: batches without a usable episode, or only batches that were dropped.

While no batch was usable yet, the cause is most likely in the run itself, which ends at once if the engine
failed, or as soon as `FAILING_TASKS` tasks (or all) have: a few bad ones among good ones do not end it.
After a batch that could be trained on it is more likely an outage (a server that restarts, a full disk). Such
a batch trains nothing, and the run goes on after a wait, until `MOST_IN_A_ROW` of them have come in a row.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from agentenv.core.errors import TrainingFailed
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.core.visible import logger
from agentenv.training.learners.learner import Processes
from agentenv.training.loop.event_loop import beside_the_loop

__all__ = ["UsableEpisodes", "cause_of"]

log = logger(__name__)

WAITS_S = (15.0, 30.0, 60.0, 120.0, 240.0)
"""How long a run waits after the first, the second, ... batch in a row without a usable episode."""
MOST_IN_A_ROW = len(WAITS_S) + 1
"""Batches in a row without a usable episode with which a run ends."""
FAILING_TASKS = 5
"""If half of the tasks fail, so many in a row do by chance in 3 runs of 100."""
_NO_SPREAD = "dropped/zero_std_episodes"


class UsableEpisodes:
    """Checks over one call of the loop that there was something to train on.

    All processes of a launch come to the same result, because each check covers the episodes of all of them.
    """

    def __init__(self, world: Processes) -> None:
        self._world = world
        self._steps = 0
        self._trained_tokens = 0.0
        self._dropped: Counter[str] = Counter()
        self._in_a_row = 0
        """Batches without a usable episode since the last one with any."""
        self._failing: set[str] | None = set()
        """The tasks that failed before any batch was usable; None once one was."""

    async def check(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Check that at least one episode of a batch is usable; wait for an outage to end if none is.

        Args:
            step: number of the step, from 1, for the message.
            groups: the episodes that this process played.

        Raises:
            TrainingFailed: No process had a usable episode yet, or in `MOST_IN_A_ROW` batches in a row; the
                message holds the first episode's error.
        """
        error, lasting = await beside_the_loop(partial(self._failure, step, groups))
        if error is None:
            return
        self._in_a_row += 1
        if lasting or self._in_a_row == MOST_IN_A_ROW:
            raise error
        if self._failing is not None:
            log.warning("%s; the next batch is played", error.message)
            return
        wait = WAITS_S[self._in_a_row - 1]
        log.warning("%s; the next batch is played after %.0f s", error.message, wait)
        await asyncio.sleep(wait)

    def _failure(self, step: int, groups: Sequence[TrajectoryGroup]) -> tuple[TrainingFailed | None, bool]:
        """Return why nothing of a batch can be trained on, and whether no other batch can, either.

        It is the same in all processes.
        """
        episodes = [episode for group in groups for episode in group]
        usable = sum(len(group.usable) for group in groups)
        causes = [] if usable else list(map(cause_of, episodes[:1]))
        tasks = sorted({f"{episode.env_id}:{episode.task_id}" for episode in episodes})
        no_engine = all(one.error is not None and one.error.boundary == "engine" for one in episodes)
        parts = self._world.gather([(len(episodes), usable, causes, tasks, no_engine)])
        played = sum(part[0] for part in parts)
        if not played:
            return None, False
        if any(part[1] for part in parts):
            self._in_a_row, self._failing = 0, None
            return None, False
        lasting = False
        if self._failing is not None:
            before = len(self._failing)
            self._failing.update(*(part[3] for part in parts))
            known = len(self._failing)
            # A batch without a new task means that all there are have failed.
            lasting = all(part[4] for part in parts) or known >= FAILING_TASKS or known == before
        what, where = next(cause for part in parts for cause in part[2])
        error = TrainingFailed(
            f"none of the {played} episodes of step {step} can be trained on; the first one: {what}",
            remedy="correct the cause; `agentenv view` shows the error of every episode",
        )
        error.add_note(where)
        return error, lasting

    def count(self, metrics: Mapping[str, float]) -> None:
        """Count what a step trained on and what it left out."""
        self._steps += 1
        self._trained_tokens += metrics["tokens/trained"]
        left_out = {name: int(value) for name, value in metrics.items() if name.startswith("dropped/")}
        self._dropped.update(left_out)

    def finish(self) -> None:
        """Check at the end of a run that at least one step had something to train on.

        Groups without spread are no failure: they have no gradient, because nothing in them differs.

        Raises:
            TrainingFailed: Everything was dropped for other reasons.
        """
        if self._trained_tokens or not self._steps or self._dropped[_NO_SPREAD]:
            return
        reasons = ", ".join(
            f"{count} {name.removeprefix('dropped/').replace('_', ' ')}"
            for name, count in self._dropped.most_common()
        )
        raise TrainingFailed(
            f"no step had anything to train on, because everything was dropped: {reasons}",
            remedy="change the limits or the options that drop these; `agentenv view` shows the episodes",
        )


def cause_of(episode: Trajectory) -> tuple[str, str]:
    """Return why an episode is not usable, and where that happened."""
    where = f"{episode.env_id}, task {episode.task_id}"
    if episode.error is not None:
        return f"{episode.error.type}: {episode.error.message}", f"{where}, {episode.error.boundary}"
    return episode.untrainable_reason or "it has no reward", where
