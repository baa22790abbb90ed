"""End a run that cannot train: batches without a usable episode, or only batches that were dropped.

If no episode of the first batch is usable, the cause is most likely in the run itself, which ends at once.
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

__all__ = ["UsableEpisodes"]

log = logger(__name__)

WAITS_S = (15.0, 30.0, 60.0, 120.0, 240.0)
"""How long a run waits after the first, the second, ... batch in a row without a usable episode."""
MOST_IN_A_ROW = len(WAITS_S) + 1
"""Batches in a row without a usable episode with which a run ends."""
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
        self._in_a_row = MOST_IN_A_ROW - 1
        """Batches without a usable episode since the last one with any; the first batch has no second try."""

    async def check(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Check that at least one episode of a batch is usable; wait for an outage to end if none is.

        Args:
            step: number of the step, from 1, for the message.
            groups: the episodes that this process played.

        Raises:
            TrainingFailed: No process had a usable episode in the first batch, or in `MOST_IN_A_ROW` batches
                in a row; the message holds the first episode's error.
        """
        error = await beside_the_loop(partial(self._failure, step, groups))
        if error is None:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row == MOST_IN_A_ROW:
            raise error
        wait = WAITS_S[self._in_a_row - 1]
        log.warning("%s; the next batch is played after %.0f s", error.message, wait)
        await asyncio.sleep(wait)

    def _failure(self, step: int, groups: Sequence[TrajectoryGroup]) -> TrainingFailed | None:
        """Return why nothing of a batch can be trained on, the same in all processes."""
        episodes = sum(len(group) for group in groups)
        usable = sum(len(group.usable) for group in groups)
        causes = [_cause(episode) for group in groups for episode in group] if not usable else []
        parts = self._world.gather([(episodes, usable, causes[:1])])
        played = sum(part[0] for part in parts)
        if not played or any(part[1] for part in parts):
            return None
        what, where = next(cause for part in parts for cause in part[2])
        error = TrainingFailed(
            f"none of the {played} episodes of step {step} can be trained on; the first one: {what}",
            remedy="correct the cause; `agentenv view` shows the error of every episode",
        )
        error.add_note(where)
        return error

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
            TrainingFailed: Nothing was played, or everything was dropped for other reasons.
        """
        if self._trained_tokens or not self._steps or self._dropped[_NO_SPREAD]:
            return
        if not self._dropped.total():
            raise TrainingFailed(
                f"no step had anything to train on: none of {self._steps} steps was given an episode",
                remedy="look at what the rollout function returns",
            )
        reasons = ", ".join(
            f"{count} {name.removeprefix('dropped/').replace('_', ' ')}"
            for name, count in self._dropped.most_common()
        )
        raise TrainingFailed(
            f"no step had anything to train on, because everything was dropped: {reasons}",
            remedy="change the limits or the options that drop these; `agentenv view` shows the episodes",
        )


def _cause(episode: Trajectory) -> tuple[str, str]:
    """Return why an episode is not usable, and where that happened."""
    where = f"{episode.env_id}, task {episode.task_id}"
    if episode.error is not None:
        return f"{episode.error.type}: {episode.error.message}", f"{where}, {episode.error.boundary}"
    return episode.untrainable_reason or "it has no reward", where
