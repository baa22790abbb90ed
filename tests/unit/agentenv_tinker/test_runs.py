"""`ae.train` on a server of the Tinker API: a whole run, demonstrations, resume, refusals, outages."""

from __future__ import annotations

import os
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import agentenv as ae
from agentenv.core import EngineUnavailable, UsageError
from agentenv.engine import Sampling, load_engine
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.training.loop import usable


class Vowels(ToolEnv):
    def start(self, n: int) -> str:
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return len(set(answer)) / 10


VOWELS = EnvSpec.of(
    "test/Vowels-v0", Vowels, tasks={"train": [{"n": n} for n in range(4)], "test": [{"n": 9}]}
)


@pytest.fixture
def server(server, tmp_path, monkeypatch):
    """The server of the other tests in float32, whose outages nobody waits for."""
    server.dtype = torch.float32
    monkeypatch.setattr(usable, "WAITS_S", (0.0,) * 5)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return server


@pytest.fixture
def name(server) -> str:
    """The model string of the server."""
    return f"tinker:{server.model}@http://127.0.0.1:1"


def train(model: str = "", **options):
    settings = {"groups_per_step": 2, "learning_rate": 0.01, "save_steps": 1, "lora": {"r": 4}}
    settings["eval_on_start"] = False
    limits = {"max_turns": 1, "max_tokens_per_turn": 4}
    given = {"steps": 2, "group_size": 3, "train": settings, "limits": limits, **options}
    return ae.train(VOWELS, model, **given)


def adapter(result) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(result.checkpoint / "adapter_model.safetensors")


def test_a_run_trains_evaluates_saves_and_resumes_as_if_it_had_not_stopped(server, name):
    engine = {"prices": {"prefilled": 1.0, "sampled": 2.0, "trained": 3.0}}
    whole = train(name, steps=3, engine=engine)
    assert whole.steps_done == 3
    last = whole.history[-1]
    assert {"eval/success", "eval/reward", "spent/cost", "mismatch/k3"} <= last.keys()
    assert last["mismatch/abs_max"] < 1e-4  # sampler and trainer agree: the weights are the same version
    assert [step["weights_version"] for step in whole.history] == [1.0, 2.0, 3.0]
    assert {version for one in whole.run for version in one.weights_versions} == {0, 1, 2, 3}
    million = sum(
        n * last[f"spent/{kind}_tokens"] for n, kind in enumerate(("prefilled", "sampled", "trained"), 1)
    )
    assert last["spent/cost"] == pytest.approx(million / 1e6)

    first = train(name, steps=2, runs_dir="other")
    again = train(resume=first.run.path, steps=3, runs_dir="other")
    assert again.steps_done == 3
    # What the first part spent is counted on.
    assert again.history[-1]["spent/sampled_tokens"] >= last["spent/sampled_tokens"]
    found, wanted = adapter(again), adapter(whole)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    # The checkpoint is a model that this machine plays, too.
    loaded = load_engine(f"hf:{whole.checkpoint}")
    assert loaded.engine.max_context_tokens


def test_demonstrations_are_imitated_first(server, name, tmp_path):
    (tmp_path / "show.py").write_text("def show(messages, task, rng):\n    return 'ab'\n")
    result = train(name, demos="show.py:show", num_demos=4, steps=1)
    assert result.steps_done == 1
    assert result.history[0]["weights_version"] == 2.0


@pytest.mark.parametrize("kind", ["sum", "mean_mean"])
def test_a_stream_and_steps_of_several_updates_run(server, name, kind):
    server.reduction = kind
    settings = {"lora": {"r": 4}, "max_ahead": 1, "num_minibatches": 2, "groups_per_step": 2}
    settings["learning_rate"] = 1e-3
    result = train(name, train=settings, steps=2)
    assert result.steps_done == 2


def test_a_run_outlasts_a_server_that_is_away(server, name):
    samples = iter(range(1000))

    def fault(call, _):
        # The first step is played. Then all episodes of the next batch fail.
        return "before" if call == "sample" and 6 <= next(samples) < 12 else ""

    server.fault = fault
    result = train(name, steps=3)
    assert result.steps_done == 3
    assert result.history[-1]["updates"] == 1.0


def test_a_server_that_starts_again_loses_no_episode_and_no_step(server, name):
    whole = train(name, steps=3, runs_dir="whole")
    begin = server.log.index(("sample",))
    number = len(server.log) - begin
    moments = {begin + number * part // 8 for part in range(1, 8)}

    def fault(call, count):
        server.starts += count in moments
        return ""

    server.calls, server.fault = begin, fault
    found = train(name, steps=3)
    assert server.starts == 7
    assert [step["weights_version"] for step in found.history] == [1.0, 2.0, 3.0]
    assert not any(one.stop_reason.failed for one in found.run)
    wanted = adapter(whole)
    assert all(torch.equal(value, wanted[name]) for name, value in adapter(found).items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_driver_that_is_killed_at_any_of_ten_moments_makes_each_step_once(server, name):
    wanted = adapter(train(name, steps=3, runs_dir="whole"))
    server.calls = 0
    train(name, steps=3, runs_dir="measured")  # without the probe, whose findings are kept
    calls = [name for (name,) in server.log[-server.calls :]]
    begin = calls.index("save_weights_for_sampler") + 2  # the first checkpoint is there
    for moment in range(begin, len(calls), (len(calls) - begin) // 9):
        runs = Path(f"killed-{moment}")
        server.calls = 0
        if not (driver := os.fork()):
            server.fault = lambda call, count, moment=moment: os._exit(9) if count == moment else ""
            with suppress(BaseException):
                train(name, steps=3, runs_dir=runs)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(driver, 0)[1]) == 9
        (killed,) = runs.iterdir()

        again = train(resume=killed, steps=3, runs_dir=runs)

        assert [row["step"] for row in again.run.metrics()] == [1, 2, 3]
        steps = Counter(note["step"] for note in again.run.annotations().values() if "step" in note)
        assert steps == {1: 6, 2: 6, 3: 6}
        assert set(Counter((one.group_id, one.member) for one in again.run.summaries).values()) == {1}
        assert all(torch.equal(value, wanted[name]) for name, value in adapter(again).items()), moment


def test_what_a_server_cannot_do_is_refused_before_a_run_is_made(server, name, tmp_path):
    for settings in ({"lora": {"r": 4}, "temperature": 0.5}, {}, {"lora": {"r": 4}, "fsdp": True}):
        with pytest.raises(UsageError):
            train(name, train=settings)
    server.clips = False
    with pytest.raises(UsageError, match="max_grad_norm=1e9"):
        train(name)
    server.alive = False
    with pytest.raises(EngineUnavailable):
        train(name.replace(":1", ":2"))
    assert not (tmp_path / "runs").exists()


def test_a_server_that_is_not_there_is_told_before_anything_else(model):
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]

    for begin in (
        lambda: load_engine(f"tinker:{model}@http://127.0.0.1:{port}"),
        lambda: train(f"tinker:{model}@http://127.0.0.1:{port}"),
    ):
        with pytest.raises(EngineUnavailable, match=f"127.0.0.1:{port} does not answer: Connection refused"):
            begin()


async def test_the_engine_samples_what_the_server_says(server, name):
    engine = load_engine(name, max_context_tokens=40).engine
    asked = Sampling(max_tokens=64, seed=2**62 + 5)
    one = await engine.generate(list(range(5, 37)), asked, stop_token_ids=[2])
    assert len(one.token_ids) <= 8
    assert one.version_ranges == ((0, 0, len(one.token_ids)),)
    assert one == await engine.generate(list(range(5, 37)), asked, stop_token_ids=[2])
    hot = await engine.generate([5, 6], Sampling(temperature=2.0, max_tokens=3), stop_token_ids=[])
    assert "temperature" in hot.unfit_for_training(Sampling(temperature=2.0))
    for wrong in (Sampling(min_p=0.1), Sampling(adapter="x")):
        with pytest.raises(UsageError):
            await engine.generate([5], wrong, stop_token_ids=[])


def test_an_evaluation_needs_no_training(server, name):
    limits, engine = {"max_turns": 1, "max_tokens_per_turn": 4}, {"prices": {"sampled": 2.0}}
    result = ae.evaluate(VOWELS, name, limits=limits, engine=engine)
    ((one,),) = result.groups
    assert one.trainable
    sampled = one.turns[0].num_tokens
    assert result.report.spent["spent/sampled_tokens"] == sampled
    assert f"{sampled} sampled   cost {2e-6 * sampled:.4g}" in str(result.report)
