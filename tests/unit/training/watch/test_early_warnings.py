"""What a run says in words, and which tokens it lists."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from agentenv.core import StopReason, Trajectory, TrajectoryGroup
from agentenv.training.watch import busiest_bound, early_warnings
from agentenv.training.watch.warn import TaskLedger
from helpers import prompts

FINE = {
    "groups/frac_mixed": 0.5,
    "reward": 0.4,
    "entropy": 0.7,
    "completions/clipped_ratio": 0.1,
    "mismatch/k3": 1e-4,
    "mismatch/frac_outside": 0.01,
    "tasks/met": 20.0,
    "tasks/rewarded": 4.0,
    "envs/met": 2.0,
    "envs/rewarded": 2.0,
    "updates/not_finite": 0.0,
}

PROBLEMS = {
    "no episode earns anything; warm the model up on demonstrations, or on more of them": {
        "groups/frac_mixed": 0.0,
        "groups/frac_all_bad": 1.0,
    },
    "all episodes of a task earn the same; raise num_generations": {
        "groups/frac_mixed": 0.0,
        "groups/frac_all_bad": 0.5,
    },
    "there is no gradient: all 32 episodes have the reward 0.4: does reward() tell answers apart?": {
        "groups/frac_mixed": 0.0,
        "groups/frac_all_bad": 0.0,
        "tasks/rewarded": 0.0,
        "episodes": 32.0,
    },
    "every episode of every group is right": {"groups/frac_mixed": 0.0, "groups/frac_all_good": 1.0},
    "sampler and trainer disagree": {"mismatch/k3": 4.3},
    "entropy has collapsed to 0.001": {"entropy": 0.001},
    "80% of the episodes hit a limit: raise it": {"completions/clipped_ratio": 0.8},
    "80% of the episodes are cut (generation_length): raise max_tokens_per_turn": {
        "completions/clipped_ratio": 0.8,
        "stop/generation_length": 20.0,
        "stop/max_turns": 6.0,
    },
    "of 20 different tasks only one": {"tasks/rewarded": 1.0},
    "of 2 environments only one": {"envs/rewarded": 1.0},
    "a gradient was not finite": {"updates/not_finite": 1.0},
    "of 10 episodes most were left out of training: 4 failed episodes, 2 rows too long": {
        "episodes": 10.0,
        "dropped/failed_episodes": 4.0,
        "dropped/rows_too_long": 2.0,
        "dropped/zero_std_episodes": 4.0,
    },
}


@pytest.mark.parametrize("text", PROBLEMS)
def test_each_problem_is_said_when_it_begins_and_once(text):
    (warning,) = early_warnings([FINE | PROBLEMS[text]])

    assert text in warning
    assert early_warnings([FINE | PROBLEMS[text]] * 2) == []
    assert early_warnings([FINE]) == []


def test_groups_without_spread_because_of_a_limit_name_it():
    cut = {"completions/clipped_ratio": 0.8, "stop/max_turns": 26.0}

    spread, truncated = early_warnings([FINE | cut | {"groups/frac_mixed": 0.0, "groups/frac_all_bad": 1.0}])

    assert "there is no gradient: most episodes are cut (max_turns): raise max_turns" in spread
    assert "80% of the episodes are cut" in truncated


def test_a_reward_that_does_not_rise_though_groups_have_spread_asks_for_a_higher_rate():
    flat = [FINE | {"learning_rate": 1e-5}] * 10
    rising = [FINE | {"reward": 0.1 * step} for step in range(8)]

    (warning,) = early_warnings(flat)

    assert "raise learning_rate (now 1e-05) twofold" in warning
    assert early_warnings([*flat, flat[0]]) == []
    assert early_warnings(flat[:9]) == []
    assert early_warnings(rising) == []
    assert early_warnings([FINE | {"reward": 0.95}] * 10) == []


def test_few_tasks_met_say_nothing_about_tasks():
    assert early_warnings([FINE | {"tasks/met": 7.0, "tasks/rewarded": 1.0, "envs/rewarded": 1.0}]) == []


def test_no_mixed_group_for_one_step_in_three_is_no_warning():
    assert early_warnings([FINE, FINE, FINE | {"groups/frac_mixed": 0.0}]) == []


def played(env: str, task: str, *rewards: float | None) -> TrajectoryGroup:
    return TrajectoryGroup(
        tuple(Trajectory(env, task, 0, task, StopReason.FINAL_ANSWER, reward=one) for one in rewards)
    )


def test_the_ledger_counts_tasks_that_ever_earned_more_than_the_worst():
    alone = SimpleNamespace(gather=list)
    ledger = TaskLedger()

    first = ledger.add(alone, [played("a", "1", -1.0, -1.0), played("a", "2", -1.0, 0.5)])
    second = ledger.add(alone, [played("a", "1", -1.0, None), played("b", "1", -1.0)])

    assert first == {"tasks/met": 2.0, "tasks/rewarded": 1.0}
    assert second == {"tasks/met": 3.0, "tasks/rewarded": 1.0, "envs/met": 2.0, "envs/rewarded": 1.0}


def test_a_run_says_its_problems(tmp_path, caplog):
    trainer = prompts.trainer_of(tmp_path)
    trainer.grpo.loss_fn = lambda x: x.logprobs_N * torch.inf

    with caplog.at_level(logging.WARNING):
        trainer.train()

    assert "step 1: a gradient was not finite" in caplog.text


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
