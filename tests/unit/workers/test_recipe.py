"""The recipe, from which a worker opens what the driver has."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.core import UsageError
from agentenv.engine import Sampling
from agentenv.envs import EnvSpec
from agentenv.runner import DropToolOutputs, RunnerOptions
from agentenv.workers import Recipe
from helpers.deadly import Deadly
from helpers.worker_runs import recipe_of

SPEC = EnvSpec.of("helpers/Recipe-v0", Deadly, tasks=[{"x": 1}])


def recipe(model: str = "random", **values: Any) -> Recipe:
    given = {"runner": RunnerOptions(retries=0, history="rewrite"), "sampling": Sampling(stop=("END",))}
    return recipe_of([SPEC], model, **{**given, **values})


def test_a_recipe_opens_the_same_runner_and_environment():
    text = recipe(run_seed=7).to_json()

    again = Recipe.from_json(text)
    runner = again.load_runner(name="w1.")

    assert again.to_json() == text
    assert again.load_specs() == [SPEC]
    assert (runner.run_seed, runner.limits.max_turns, runner.sampling.stop) == (7, 3, ("END",))
    assert (runner.options.retries, runner.options.history) == (0, "rewrite")


def test_workers_share_the_requests_of_each_server():
    shared = recipe("http://a:8000/v1", workers=3, engine={"retry_s": 5.0})
    limited = recipe("http://a:8000/v1", workers=4, engine={"concurrency": 8})

    assert dict(shared.engine) == {"retry_s": 5.0, "concurrency": 86}
    assert dict(limited.engine) == {"concurrency": 2}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"runner": RunnerOptions(condenser=DropToolOutputs())}, "condenser"),
        ({"engine": {"seed": object()}}, "cannot be sent to worker processes"),
    ],
)
def test_a_part_or_an_option_that_is_an_object_is_refused(given, told):
    with pytest.raises(UsageError, match=told):
        recipe(**given)
