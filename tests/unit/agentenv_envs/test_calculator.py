"""The bundled arithmetic environment."""

import random
import subprocess
import sys

import pytest

from agentenv.core import Action
from agentenv.envs import make, spec
from agentenv_envs.calculator import oracle

ENTRY = spec("agentenv/Calculator-v0")


def play(policy, task, seed=0):
    env, rng = make(ENTRY), random.Random(seed)
    messages, _ = env.reset(seed=seed, options={"task": task})
    reward, terminated = 0.0, False
    for _ in range(ENTRY.max_turns):
        action = policy(messages, task.data, rng)
        answers, reward, terminated, *_ = env.step(action)
        messages = [*messages, action, *answers]
        if terminated:
            break
    return reward if terminated else 0.0, messages


def operands(split):
    return {frozenset((task.data["a"], task.data["b"])) for task in ENTRY.task_set(split)}


def test_there_are_enough_tasks_and_no_pair_of_operands_is_in_both_splits():
    assert len(ENTRY.task_set("train")) == 800
    assert len(ENTRY.task_set("test")) == 240
    assert not operands("train") & operands("test")


def test_the_tasks_are_the_same_in_every_process():
    code = "from agentenv_envs.calculator import tasks; print([t['id'] for t in tasks('train')][:50])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == str([task.id for task in ENTRY.task_set("train").take(50)])


def test_the_oracle_solves_every_held_out_task():
    assert {play(oracle, task)[0] for task in ENTRY.task_set("test").take(60)} == {1.0}


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


async def test_an_answer_that_was_cut_counts_nothing():
    from agentenv.core import Context

    env = ENTRY.make()
    await env.begin({"a": 1, "op": "+", "b": 2}, seed=0, context=Context())
    await env.advance(Action.of({"role": "assistant", "content": "3"}))

    assert (await env.end("generation_length")).reward == 0.0
