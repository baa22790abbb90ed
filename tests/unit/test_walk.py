"""A reader of the library can follow an episode, and an evaluation loads only what it uses."""

from __future__ import annotations

from helpers.walk import EVALUATION, TRAINING, episode_walk, loaded_lines, step_walk


def test_one_episode_with_a_tool_call_visits_few_files():
    walk = episode_walk()

    assert len(walk.files) <= 42, sorted(walk.files)


def test_an_evaluation_with_the_mock_loads_few_lines():
    lines = loaded_lines(EVALUATION)

    assert sum(lines.values()) <= 23_000, sorted(lines)


def test_a_step_of_the_trainer_visits_few_files():
    walk = step_walk()

    assert len(walk.files) <= 23, sorted(walk.files)


def test_training_one_step_loads_few_lines():
    lines = loaded_lines(TRAINING)

    assert "training/step.py" in lines
    assert sum(lines.values()) <= 40_000, sorted(lines)
