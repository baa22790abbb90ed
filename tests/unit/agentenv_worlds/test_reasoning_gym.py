"""Questions of reasoning-gym score as its verifiers score them, and what a verifier cannot read is wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agentenv.core import Message, UsageError
from agentenv.envs import spec
from agentenv.runs import evaluate
from agentenv.testing import play
from agentenv_worlds.reasoning_gym.env import datasets

pytestmark = [
    pytest.mark.slow,
    # A package of ARC's tasks, which some sets use, leaves its files open.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
]
gym: Any = pytest.importorskip("reasoning_gym", reason="UNTESTED: reasoning-gym is not installed")

JUNK = (
    "",
    "nan",
    "I do not know",
    "[]",
    "{}",
    "1/0",
    "0",
    "-1",
    "[[1,2],[3]]",
    "yes",
    "1e309",
    "a b c",
    "[1,",
    "∞",
)
WITHOUT = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Sets whose own reference answers their verifiers do not accept."""
SLOW = ("futoshiki", "knight_swap", "sokoban")
"""Sets of which a row takes seconds to make."""


def official(dataset: Any, entry: dict[str, Any], answer: str) -> float:
    """Return the verifier's score, or 0 where it raises an exception."""
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:  # noqa: BLE001 - verifiers raise whatever their parsers do
        return 0.0


async def differences(names: list[str], per_set: int) -> tuple[int, list[str]]:
    """Play right, changed and junk answers; return how many were compared, and those that differ."""
    found, compared = [], 0
    for name in names:
        entry = spec(f"reasoning_gym:{name}")
        made = gym.create_dataset(name, seed=0, size=2_000)
        rng = random.Random(name)
        for task in list(entry.task_set("test").take(per_set)):
            row = made[int(str(task.data["index"]))]
            right = str(row["answer"])
            for answer in (right, right[:-1], rng.choice(JUNK)):
                text = rng.choice([answer, f"So it is <answer>{answer}</answer>."])
                played = await play(entry, lambda *_, text=text: _said(text), task)
                compared += 1
                if played.reward != official(made, row, answer.strip()):
                    found.append(f"{task.id}: {text!r} scores {played.reward}")
    return compared, found


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


async def test_answers_score_as_the_verifiers_score_them():
    compared, found = await differences(datasets()[::8], 1)

    assert compared >= 36
    assert not found


@pytest.mark.exhaustive
async def test_answers_of_all_sets_score_as_the_verifiers_score_them():
    names = [name for name in datasets() if name not in {"composite", "list_functions", *SLOW}]
    compared, found = await differences(names, 2)

    assert compared >= 500
    assert not found


def test_an_answer_on_which_the_verifier_raises_is_wrong_and_counted():
    result = evaluate("reasoning_gym:prime_factorization", "scripted:I do not know", num_tasks=3)

    assert result.report.num_scored == 3
    assert result.report.reward.mean == 0.0
    assert result.report.rewards["verifier_raised"] == 1.0


@pytest.mark.parametrize("name", WITHOUT)
def test_a_set_without_reference_answers_has_no_oracle(name):
    assert spec(f"reasoning_gym:{name}").oracle is None
    assert spec("reasoning_gym:gcd").oracle is not None


def test_a_set_that_cannot_be_made_is_refused_before_any_episode():
    with pytest.raises(
        UsageError, match=r"reasoning_gym:composite cannot be made: AssertionError: Must specify"
    ):
        spec("reasoning_gym:composite")
