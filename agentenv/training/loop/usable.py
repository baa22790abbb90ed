"""End a run that cannot train: a batch without a usable episode, or only batches that were dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from agentenv.core.errors import TrainingFailed
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.training.learners.torch.world import World

__all__ = ["UsableEpisodes"]

_NO_SPREAD = "dropped/zero_std_episodes"


class UsableEpisodes:
    """Checks over one call of the loop that there was something to train on.

    All processes of a launch come to the same result, because each check covers the episodes of all of them.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps = 0
        self._trained_tokens = 0.0
        self._dropped: Counter[str] = Counter()

    def check(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Check that at least one episode of a batch is usable.

        Args:
            step: number of the step, from 1, for the message.
            groups: the episodes that this process played.

        Raises:
            TrainingFailed: No process has a usable episode; the message holds the first episode's error.
        """
        episodes = sum(len(group) for group in groups)
        usable = sum(len(group.usable) for group in groups)
        causes = [_cause(one) for group in groups for one in group] if not usable else []
        parts = self._world.gather([(episodes, usable, causes[:1])])
        played = sum(part[0] for part in parts)
        if not played or any(part[1] for part in parts):
            return
        what, where = next(cause for part in parts for cause in part[2])
        error = TrainingFailed(
            f"none of the {played} episodes of step {step} can be trained on; the first one: {what}",
            remedy="correct the cause; `agentenv view` shows the error of every episode",
        )
        error.add_note(where)
        raise error

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


def _cause(one: Trajectory) -> tuple[str, str]:
    """Return why an episode is not usable, and where that happened."""
    where = f"{one.env_id}, task {one.task_id}"
    if one.error is not None:
        return f"{one.error.type}: {one.error.message}", f"{where}, {one.error.boundary}"
    return one.untrainable_reason or "it has no reward", where
