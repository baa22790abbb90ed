"""Questions of reasoning-gym: what a verifier cannot read is wrong, and a set without references has no oracle."""

from __future__ import annotations

import pytest

from agentenv.runs import evaluate
from helpers.worlds import world

pytestmark = [
    pytest.mark.slow,
    # A package of ARC's tasks, which some sets use, leaves its files open.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
]
WITHOUT = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Sets whose own reference answers their verifiers do not accept."""


def test_an_answer_on_which_the_verifier_raises_is_wrong_and_counted():
    world("reasoning_gym:prime_factorization")
    result = evaluate("reasoning_gym:prime_factorization", "scripted:I do not know", num_tasks=3)

    assert result.report.num_scored == 3
    assert result.report.reward.mean == 0.0
    assert result.report.rewards["verifier_raised"] == 1.0


@pytest.mark.parametrize("name", WITHOUT)
def test_a_set_without_reference_answers_has_no_oracle(name):
    assert world(f"reasoning_gym:{name}").oracle is None
    assert world("reasoning_gym:gcd").oracle is not None
