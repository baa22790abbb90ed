"""Random answers score here as the worlds' own authors score them; see docs/worlds/agreement.md."""

from random import Random

import pytest

from agentenv.envs import world_registry
from agreement import WORLDS, Agreement, compare
from agreement.change import KINDS, changed_calls
from helpers.worlds import needs

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

FEW = {"tau2 retail": 3, "tau2 airline": 3, "crafter": 1, "nethack": 2, "textworld": 4, "scienceworld": 3}
"""Answers that are compared of the slow worlds; 24 of the others."""


def test_a_score_that_differs_is_kept_with_what_was_said():
    result = Agreement("x")

    result.add(1.0, 1.0, "same")
    result.add(0.0, 1.0, "paid for junk")
    result.add(1.0, None, "no score")

    assert (result.compared, result.rewarded) == (3, 2)
    assert result.differ == ["paid for junk: 0.0 there, 1.0 here", "no score: 1.0 there, None here"]


def test_answers_are_changed_in_every_way():
    kinds = {changed_calls([("f", {"a": 1, "b": [2]}), ("g", {})], Random(seed))[0] for seed in range(200)}

    assert kinds == set(KINDS)


def needed(world):
    name = world.partition(" ")[0]
    needs(*world_registry[name].modules, *(["openai"] if name == "bfcl" else []))


@pytest.mark.engine
@pytest.mark.parametrize("world", WORLDS)
async def test_random_answers_score_as_the_authors_score_them(world):
    needed(world)

    result = await compare(world, FEW.get(world, 24), seed=1)

    assert result.compared
    assert not result.differ


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", WORLDS)
async def test_hundreds_of_random_answers_score_as_the_authors_score_them(world):
    needed(world)

    result = await compare(world)

    assert result.rewarded > 0
    assert not result.differ
