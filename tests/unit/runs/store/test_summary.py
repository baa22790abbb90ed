"""What a summary says of a task: the beginning of its first observation, and its answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentenv.runs.store import summarize
from helpers.sample_runs import episode


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "How\n many?"}),
            "How many?",
        ),
        (({"role": "developer", "content": "Be brief."}, {"role": "assistant", "content": "Hi"}), ""),
        (
            ({"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image_url"}]},),
            "Look:",
        ),
        (({"role": "user", "content": 5},), ""),
        ((), ""),
    ],
    ids=["system", "model-speaks-first", "image", "not-a-content", "none"],
)
def test_question_is_the_text_of_the_first_observation(messages, expected):
    summary = summarize(replace(episode(0, 0), messages=messages))

    assert summary.question == expected


def test_question_of_a_long_observation_is_its_beginning():
    told = ({"role": "user", "content": "word " * 100_000},)
    spaces = ({"role": "user", "content": "word" + " " * 100_000 + "end"},)

    long = summarize(replace(episode(0, 0), messages=told)).question
    assert len(long) == 160
    assert long.startswith("word word")
    assert long.endswith("…")
    assert summarize(replace(episode(0, 0), messages=spaces)).question == "word…"


@pytest.mark.parametrize(
    ("task", "expected"),
    [({"answer": "Paris"}, "Paris"), ({"answer": [1, 2]}, "[1,2]"), ({"answer": 0}, "0"), ({}, "")],
)
def test_expected_answer_is_the_field_of_the_task(task, expected):
    assert summarize(replace(episode(0, 0), task=task)).expected == expected
