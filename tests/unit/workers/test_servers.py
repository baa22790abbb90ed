"""The driver spreads the episodes of all workers evenly over the engine's servers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from agentenv.core import UsageError
from agentenv.engine import Sampling
from agentenv.envs import EnvSpec
from agentenv.runner import DropToolOutputs, RunnerOptions
from agentenv.workers import Recipe
from agentenv.workers.servers import ServerShares, num_servers_of, server_metrics, servers_text, together
from helpers.deadly import Deadly
from helpers.fake_vllm import engine_on, say, serving
from helpers.worker_runs import recipe_of


@pytest.mark.parametrize(
    ("model", "number"),
    [("http://a:8000/v1", 1), ("http://a:1/v1, https://b:2/v1,", 2), ("openai:gpt", 0), ("random", 0)],
)
def test_the_engine_string_tells_the_number_of_servers(model: str, number: int):
    assert num_servers_of(model) == number


def test_the_server_with_the_fewest_episodes_is_lent():
    shares = ServerShares(3)
    with ExitStack() as episodes:
        lent = [episodes.enter_context(shares.lend()) for _ in range(7)]
        assert sorted(lent[:3]) == sorted(lent[3:6]) == [0, 1, 2]
        assert sorted(shares.episodes) == [2, 2, 3]
        assert shares.episodes[lent[6] or 0] == 3

    assert shares.episodes == [0, 0, 0]


def test_episodes_one_after_another_go_round():
    shares, lent = ServerShares(2), []
    for _ in range(4):
        with shares.lend() as server:
            lent.append(server)

    assert lent in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_drivers_do_not_all_begin_with_the_same_server():
    first: set[int | None] = set()
    for _ in range(60):
        with ServerShares(2).lend() as server:
            first.add(server)

    assert first == {0, 1}


@pytest.mark.parametrize("number", [0, 1])
def test_without_a_choice_none_is_made(number: int):
    with ServerShares(number).lend() as server:
        assert server is None


def row(server: str, **values: object) -> dict[str, object]:
    plain = {"used": True, "sessions": 1, "in_flight": 2, "failures": 0, "version": 3, "problem": ""}
    return {"server": server, **plain, **values}


def test_the_rows_of_all_processes_are_added_up_for_each_server():
    lost = row("b:1", used=False, failures=1, version=None, problem="b:1 does not answer")

    first, second = together([row("a:1"), row("b:1"), row("a:1", sessions=4, version=4), lost])

    assert first | {"time": 0} == {
        "server": "a:1",
        "time": 0,
        "processes": 2,
        "used": 2,
        "sessions": 5,
        "in_flight": 4,
        "failures": 0,
        "version": 3,
        "problem": "",
    }
    assert (second["used"], second["processes"], second["version"]) == (1, 2, 3)
    assert second["problem"] == "b:1 does not answer"


def test_servers_are_worth_a_word_if_there_are_several_or_one_failed():
    good, bad = row("a:1"), row("b:1", used=False, failures=2)

    assert servers_text(together([good])) == ""
    assert servers_text(together([good, row("c:1")])) == "2/2 servers"
    assert servers_text(together([good, bad])) == "1/2 servers, 2 failures"


async def test_the_engine_of_servers_tells_how_they_do_without_their_passwords():
    async with serving() as fake, serving() as other, engine_on(fake, other, retry_s=5.0) as engine:
        await say(engine, session="episode")
        await other.stop()
        await engine._pool.take_out(engine._pool.servers[1], RuntimeError(f"{other.url} is gone"))
        engine._pool.servers[0].url = fake.url.replace("//", "//user:secret@")
        rows = engine.servers()

        host = fake.url.removeprefix("http://")
        gone = other.url.removeprefix("http://")
        assert [row["server"] for row in rows] == [host, gone]
        assert (rows[1]["used"], rows[1]["failures"], rows[1]["version"]) == (False, 1, None)
        assert rows[1]["problem"] == f"{gone} is gone"
        assert rows[0]["version"] == 0
        assert sum(row["sessions"] for row in rows) == 1
        assert server_metrics(engine) == {"servers/used": 1.0, "servers/failures": 1.0}
    assert server_metrics(object()) == {}


# The recipe, from which a worker opens what the driver has --------------------------------


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
