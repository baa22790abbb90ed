"""What a training spends its time on is said in words, with what would make it faster."""

from __future__ import annotations

import pytest

from agentenv.training.watch import busiest_bound

STREAM = {"stream/queued": 0.0, "stream/playing": 8.0}


def step(total: float = 10.0, **spent: float) -> dict[str, float]:
    names = {"groups": "time/wait/groups", "staleness": "time/wait/staleness"}
    return {"step_time": total} | {names.get(name, f"time/{name}"): value for name, value in spent.items()}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (
            step(groups=8, update=1),
            "80% of the time the trainer waited for groups to finish; batches that wait",
        ),
        (step(groups=8) | STREAM, "every group that may begin is being played: raise max_ahead"),
        (step(groups=8) | STREAM | {"stream/queued": 3.0}, "wait for room: raise runner.concurrency"),
        (
            step(staleness=6, groups=2) | STREAM,
            "60% of the time the trainer had enough groups and waited for old",
        ),
        (step(update=5, logprob=2, groups=1), "70% of the time the trainer trained; playing is fast enough"),
        (step(update=17.4, logprob=1.5, groups=18.6, total=38), "trained; playing takes nearly as long"),
        (step(sync=9), "90% of the time the trainer brought the weights to the engine"),
    ],
)
def test_the_busiest_bound_is_named_with_its_share_and_a_remedy(metrics, said):
    assert said in busiest_bound([step(update=1000, total=1000), metrics])


def test_the_first_step_counts_only_if_it_is_the_only_one():
    first, later = step(sync=9), step(groups=5, update=1)

    assert "brought the weights" in busiest_bound([first])
    assert "50% of the time the trainer waited" in busiest_bound([first, later, later])


@pytest.mark.parametrize("history", [[], [{}], [{"reward": 1.0}, {"step_time": 0.0}]])
def test_without_times_nothing_is_said(history):
    assert busiest_bound(history) == ""
