"""A reader of the library can follow an episode, and an evaluation loads only what it uses."""

from __future__ import annotations

from helpers.walk import EVALUATION, episode_walk, loaded_lines


def test_one_episode_with_a_tool_call_visits_few_files():
    walk = episode_walk()

    assert len(walk.files) <= 40, sorted(walk.files)


def test_an_evaluation_with_the_mock_loads_few_lines():
    lines = loaded_lines(EVALUATION)

    assert sum(lines.values()) <= 22_000, sorted(lines)
