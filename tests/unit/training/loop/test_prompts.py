"""Tasks whose prompt leaves no room are left out before the first step, and counted."""

from __future__ import annotations

import logging

import pytest

import agentenv as ae
from agentenv.core import UsageError
from agentenv.core.loops import run_blocking
from agentenv.runner import RunnerOptions
from helpers.prompts import Long, trainer_of


@pytest.mark.parametrize(
    "options",
    [
        {"max_prompt_length": 300},
        {
            "max_prompt_length": 10_000,
            "limits": ae.RunLimits(max_turns=1, max_tokens_per_turn=4, max_context_tokens=300),
        },
        {"max_prompt_length": 10_000, "spec_limits": ae.RunLimits(max_context_tokens=300)},
    ],
)
def test_long_prompts_are_left_out_counted_and_never_played(tmp_path, caplog, options):
    trainer = trainer_of(tmp_path, max_steps=5, **options)

    with caplog.at_level(logging.WARNING):
        history = trainer.train()

    assert (history[0]["tasks/checked"], history[0]["tasks/too_long"]) == (8, 3)
    assert "tasks/too_long" not in history[1]
    assert "3 of 8 tasks are left out" in caplog.text
    assert Long.scored
    assert max(Long.scored) < 100
    assert len(Long.scored) == 5 * 2 * 2
    assert trainer.cursors["test/Long-v0"] > 10  # the dealing went past what was left out


@pytest.mark.parametrize(
    ("longest", "counts", "begun"),
    [
        # Two steps of two tasks, and two in the place of long ones.
        (300, {"tasks/checked": 6, "tasks/too_long": 2}, 6),
        (10_000, {"tasks/checked": 4, "tasks/too_long": 0}, 4),
        (None, {}, 0),
    ],
)
def test_looking_at_a_prompt_scores_nothing_and_only_a_limit_needs_a_look(tmp_path, longest, counts, begun):
    trainer = trainer_of(tmp_path, max_prompt_length=longest)

    assert run_blocking(trainer.rollouts.leave_out_long_prompts({})) == counts

    assert len(set(Long.begun)) == len(Long.begun) == begun
    assert Long.scored == []


def test_a_set_without_a_short_prompt_is_refused_with_its_shortest(tmp_path):
    trainer = trainer_of(tmp_path, tasks=[{"size": 400}, {"size": 900}], max_prompt_length=300)

    with pytest.raises(
        UsageError, match=r"every prompt of test/Long-v0 is too long: the shortest of 2 has 4\d\d"
    ):
        trainer.train()


def test_endless_tasks_are_checked_as_far_as_the_run_goes(tmp_path):
    trainer = trainer_of(tmp_path, tasks=lambda seed: {"size": 400 if seed % 2 else 4}, max_prompt_length=300)

    history = trainer.train()

    assert history[0]["tasks/checked"] - history[0]["tasks/too_long"] == 4
    assert history[0]["tasks/too_long"]
    assert trainer.steps_done == 2


@pytest.mark.parametrize(
    ("tasks", "groups"),
    [
        (lambda seed: {"size": 400 if seed % 3 else 4}, 3),
        ([{"size": size} for size in [500, 400, 4] * 6], 3),
        ([*({"size": 400 + n} for n in range(9)), {"size": 4}], 1),
    ],
    ids=["endless", "mixed", "the last of all"],
)
def test_tasks_that_take_the_place_of_long_ones_are_checked_too(tmp_path, tasks, groups):
    trainer = trainer_of(tmp_path, tasks=tasks, max_prompt_length=300, groups_per_step=groups)

    assert trainer.train()[0]["tasks/too_long"] > 1
    assert set(Long.scored) == {4}


def test_a_task_that_fails_to_begin_is_not_called_too_long(tmp_path):
    trainer = trainer_of(tmp_path, tasks=[{"size": 3}, {"size": "no number"}], max_prompt_length=300)

    assert run_blocking(trainer.rollouts.leave_out_long_prompts({}))["tasks/too_long"] == 0


def test_a_prompt_that_a_condenser_shortens_is_not_too_long(tmp_path):
    limits = ae.RunLimits(max_turns=1, max_tokens_per_turn=4, max_context_tokens=300)
    options = RunnerOptions(condenser="agentenv_extras:Keywords")
    trainer = trainer_of(tmp_path, limits=limits, runner=options)
    assert run_blocking(trainer.rollouts.leave_out_long_prompts({})) == {}

    trainer = trainer_of(tmp_path, limits=limits, runner=options, max_prompt_length=300)
    assert run_blocking(trainer.rollouts.leave_out_long_prompts({}))["tasks/too_long"] > 0


def test_a_training_condenses_the_prompts_that_do_not_fit_with_its_own_policy(tmp_path):
    limits = ae.RunLimits(max_turns=1, max_tokens_per_turn=4, max_context_tokens=900)
    sizes = {"max_chars": 400, "min_chars": 50, "keep_ends": 0, "sampling": {"max_tokens": 8}}
    runner = RunnerOptions(condenser={"name": "agentenv_extras:SummarisePassages", **sizes})
    played = []
    trainer = trainer_of(
        tmp_path,
        tasks=[{"size": 4}, {"size": 1200}],
        limits=limits,
        runner=runner,
        on_trajectory=played.append,
    )

    trainer.train()

    shortened = [episode for episode in played if episode.task["size"] == 1200]
    assert shortened
    assert all(episode.rewrites and episode.trainable and not episode.error for episode in shortened)
    assert all(len(episode.sequences[0]) < 900 for episode in played)
