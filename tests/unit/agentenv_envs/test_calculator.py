"""The bundled arithmetic environment."""

import subprocess
import sys

import pytest

from agentenv.core import Action, Context
from agentenv.envs import make, spec

ENTRY = spec("agentenv/Calculator-v0")


def operands(split):
    return {frozenset((task.data["a"], task.data["b"])) for task in ENTRY.task_set(split)}


def test_the_tasks_are_the_same_in_every_process_and_no_operands_in_both_splits():
    code = "from agentenv_envs.calculator import tasks; print([t['id'] for t in tasks('train')][:50])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == str([task.id for task in ENTRY.task_set("train").take(50)])
    assert [len(ENTRY.task_set(split)) for split in ("train", "test")] == [800, 240]
    assert not operands("train") & operands("test")


async def test_an_answer_that_was_cut_counts_nothing():
    env = ENTRY.make()
    await env.begin({"a": 1, "op": "+", "b": 2}, seed=0, context=Context())
    await env.advance(Action.of({"role": "assistant", "content": "3"}))
    assert (await env.end("generation_length")).reward == 0.0


@pytest.mark.parametrize(
    ("words", "reward"),
    [
        ("-135", 1.0),
        ("It is -135.", 1.0),
        ("787 - 922 = \u2212135", 1.0),
        ("-135.0", 1.0),
        ("135", 0.0),
        ("-135 or 4", 0.0),
        ("", 0.0),
        ("I do not know.", 0.0),
    ],
)
def test_the_last_number_of_the_answer_counts(words, reward):
    env = make(ENTRY)
    env.reset(options={"task": {"a": 787, "op": "-", "b": 922}})

    assert env.step(words)[1] == reward
