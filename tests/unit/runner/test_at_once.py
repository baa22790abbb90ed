"""How many episodes run at once: what the run names, else what the engine's servers hold."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from agentenv.cli import main
from agentenv.cli.dashboard import Dashboard
from agentenv.core import RunLimits
from agentenv.engine import Features, load_engine
from agentenv.runner.options import AtOnce, episodes_at_once
from helpers.fake_vllm import cache_metrics, engine_on, serving
from helpers.model_server import model_server
from scenes import Go, registered, runner, saved_model, spec_of

BLOCKS = {"block_size": 16, "num_gpu_blocks": 200}


def engine_of(cache: int, context: int | None = 1024):
    return SimpleNamespace(
        max_context_tokens=context, features=Features(episodes_at_once=lambda length: cache // length)
    )


@pytest.mark.parametrize(
    ("cache", "limit", "processes", "number"),
    [
        (100_000, 500, 1, 200),
        (100_000, 500, 4, 50),
        (5000, 500, 1, 10),
        (100, 500, 1, 1),
        (100_000, None, 1, 97),
        # The context of the model is only what an episode could fill, so it does not lower the default.
        (5000, None, 1, 32),
        (100_000, 5000, 1, 97),
    ],
)
def test_the_cache_is_filled_with_episodes_of_the_longest_length(cache, limit, processes, number):
    limits = RunLimits(max_context_tokens=limit)

    assert episodes_at_once(None, engine_of(cache), limits, processes=processes).number == number


def test_what_the_run_names_comes_first_and_other_engines_have_a_default():
    limits = RunLimits(max_context_tokens=10)

    assert episodes_at_once(5, engine_of(1000), limits) == AtOnce(5)
    assert episodes_at_once(None, engine_of(1000, None), RunLimits()) == AtOnce(32)
    assert episodes_at_once(None, load_engine("mock").engine, limits) == AtOnce(32)


async def test_a_runner_plays_as_many_as_the_servers_hold_and_logs_why(caplog):
    async with serving(metrics=cache_metrics(BLOCKS)) as fake, engine_on(fake) as engine:
        with caplog.at_level("INFO", logger="agentenv.runner"):
            chosen = runner(engine, max_context_tokens=40, processes=2)
            named = runner(engine, max_context_tokens=40, concurrency=3)

    assert (chosen.at_once.number, named.at_once.number) == (40, 3)
    (said,) = caplog.messages
    assert said.startswith(
        "40 episodes at once: the servers serve 80 of at most 40 tokens, shared by 2 processes"
    )


def test_an_evaluation_on_a_server_plays_and_says_the_number(tmp_path, monkeypatch, capsys):
    model = saved_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    command = ["eval", "test/Go-v0", "-o", "max_context_tokens=64", "-o", "max_tokens_per_turn=2"]

    with registered(spec_of(Go)), model_server(model, metrics=cache_metrics(BLOCKS)) as server:
        command += ["-m", f"{server.url}/v1"]
        with pytest.raises(SystemExit, match="0"):
            main(command)
        chosen = capsys.readouterr().out
        with pytest.raises(SystemExit, match="0"):
            main([*command, "-o", "concurrency=5"])

    assert "· 50 at once ·" in chosen
    assert " 50 episodes at once: the servers serve 50 of at most 64 tokens; set runner.concurrency" in chosen
    assert "· 5 at once ·" in (named := capsys.readouterr().out)
    assert "episodes at once" not in named


def test_a_training_prints_what_its_runner_chose(capsys):
    log = logging.getLogger("agentenv.runner.runner")
    with Dashboard():
        log.info("40 episodes at once")
    log.info("41 episodes at once")

    assert capsys.readouterr().out == " 40 episodes at once\n"


@pytest.mark.parametrize(("left", "number"), [(None, 100), (1000, 100), (248, 50), (3, 1)])
def test_no_more_episodes_run_than_open_files_allow(monkeypatch, left, number):
    monkeypatch.setattr("agentenv.runner.options.open_files_left", lambda: left)

    found = episodes_at_once(100, engine_of(1000), RunLimits())

    assert found.number == number
    assert ("ulimit -n" in found.reason) == (number < 100)
