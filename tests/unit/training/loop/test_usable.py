"""A run that cannot train ends as soon as that is more than chance."""

from __future__ import annotations

import asyncio

import pytest
import torch

from agentenv.core import TrainingFailed
from agentenv.core.trajectory import EpisodeError, StopReason, Trajectory, TrajectoryGroup
from agentenv.training.learners.torch.world import World
from agentenv.training.loop.usable import FAILING_TASKS, UsableEpisodes


def batch(*tasks: str, boundary: str | None = "reward") -> list[TrajectoryGroup]:
    """Return a batch whose tasks all failed; without a boundary, they worked."""
    error = None if boundary is None else EpisodeError(boundary, "Gone", "it is gone", "", retryable=False)
    return [
        TrajectoryGroup(
            (
                Trajectory(
                    env_id="test/A-v0",
                    task_id=task,
                    seed=1,
                    group_id=task,
                    stop_reason=StopReason.FINAL_ANSWER if error is None else StopReason.ABORTED,
                    reward=None if error else 1.0,
                    error=error,
                    untrainable_reason="failed" if error else "",
                ),
            )
        )
        for task in tasks
    ]


def checked(*batches: list[TrajectoryGroup]) -> int:
    """Return how many batches were played."""

    async def check() -> int:
        usable = UsableEpisodes(World(torch.device("cpu")))
        for step, groups in enumerate(batches, 1):
            try:
                await usable.check(step, groups)
            except TrainingFailed:
                return step
        return len(batches)

    return asyncio.run(check())


@pytest.mark.parametrize(
    ("batches", "played"),
    [
        ([batch("0", "1", boundary="engine")] * 3, 1),
        ([[], [], batch("0", boundary="engine"), []], 3),
        ([batch(*map(str, range(FAILING_TASKS)))] * 2, 1),
        ([batch("0", "1"), batch("2", "3"), batch("4", "5"), []], 3),
        ([batch("0", "1"), batch("1", "0"), []], 2),
        ([batch("0", "1"), batch("2", "3", boundary=None), [], []], 4),
    ],
)
def test_a_run_that_never_worked_ends_when_that_is_no_chance(batches, played):
    assert checked(*batches) == played
