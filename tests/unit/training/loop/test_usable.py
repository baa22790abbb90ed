"""A run that cannot train ends as soon as that is more than chance."""

from __future__ import annotations

import asyncio

import pytest
import torch

from agentenv.core import TrainingFailed
from agentenv.core.trajectory import EpisodeError, StopReason, TrajectoryGroup
from agentenv.training.learners.torch.world import World
from agentenv.training.loop.usable import FAILING_TASKS, UsableEpisodes
from helpers.training import episode


def batch(*tasks: str, boundary: str | None = "reward") -> list[TrajectoryGroup]:
    """Return a batch whose tasks all failed; without a boundary, they worked."""
    fields: dict = {}
    if boundary is not None:
        error = EpisodeError(boundary, "Gone", "it is gone", "", retryable=False)
        fields = {"stop": StopReason.ABORTED, "error": error, "untrainable_reason": "failed"}
    return [TrajectoryGroup((episode(task, 0, None if fields else 1.0, **fields),)) for task in tasks]


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
