"""The tasks and the careless demonstrations with which an agent's learning is measured."""

from __future__ import annotations

from random import Random

import pytest

from helpers.scripts import load_benchmark


@pytest.fixture(scope="module")
def script():
    return load_benchmark("agent_learning")


def pairs(script, split):
    return {tuple(sorted((task["a"], task["b"]))) for task in script.products(split)}


def test_no_pair_of_factors_is_trained_and_held_out(script):
    train, test = pairs(script, "train"), pairs(script, "test")

    assert (len(train), len(test)) == (800, 100)
    assert not train & test


def test_the_demonstrations_are_right_in_about_three_of_ten(script):
    """The tool answers calls with its own argument names only, as that of the agent does."""
    right, called = 0, 0
    for number, task in enumerate(script.products("train")):
        draw, messages = Random(number), [{"role": "user", "content": "?"}]
        message = script.careless(messages, task, draw)
        if calls := message.get("tool_calls"):
            called += 1
            known = '"a"' in calls[0]["function"]["arguments"]
            result = str(task["a"] * task["b"]) if known else "Error"
            messages += [message, {"role": "tool", "tool_call_id": calls[0]["id"], "content": result}]
            message = script.careless(messages, task, draw)
        right += str(task["a"] * task["b"]) in message["content"]

    assert 0.65 < called / 800 < 0.75
    assert 0.25 < right / 800 < 0.35
