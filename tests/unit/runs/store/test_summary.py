"""What a summary says of a task: the beginning of its first observation, and its answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentenv.runs.store import summarize
from helpers.sample_runs import episode


def said(role, content):
    return {"role": role, "content": content}


QUESTIONS = {
    "system": ((said("system", "Be brief."), said("user", "How\n many?")), "How many?"),
    "model-speaks-first": ((said("developer", "Be brief."), said("assistant", "Hi")), ""),
    "image": ((said("user", [{"type": "text", "text": "Look: "}, {"type": "image_url"}]),), "Look:"),
    "not-a-content": ((said("user", 5),), ""),
    "none": ((), ""),
    "long": ((said("user", "word " * 100_000),), ("word " * 32)[:159] + "…"),
    "spaces": ((said("user", "word" + " " * 100_000 + "end"),), "word…"),
}


@pytest.mark.parametrize(("messages", "expected"), QUESTIONS.values(), ids=QUESTIONS)
def test_question_is_the_beginning_of_the_first_observation(messages, expected):
    assert summarize(replace(episode(0, 0), messages=messages)).question == expected


@pytest.mark.parametrize(
    ("task", "expected"),
    [({"answer": "Paris"}, "Paris"), ({"answer": [1, 2]}, "[1,2]"), ({"answer": 0}, "0"), ({}, "")],
)
def test_expected_answer_is_the_field_of_the_task(task, expected):
    assert summarize(replace(episode(0, 0), task=task)).expected == expected
