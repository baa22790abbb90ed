"""The simulator's times are those of real trainings, which are measured here on a clock that jumps."""

from __future__ import annotations

import asyncio
import copy
import sys
from contextlib import contextmanager
from random import Random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import agentenv as ae
from agentenv.engine import ScriptedEngine
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import byte_tokenizer
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer
from agentenv.training.metrics import episode_metrics
from helpers.scripts import load_benchmark
from helpers.virtual_time import run_in_virtual_time

TRAIN_S, HALF_LOAD, FULL_SPEED = 4.0, 16.0, 2.0
GROUPS, MEMBERS, STEPS = 3, 2, 24
WAYS = {
    "synchronous": {},
    "max_ahead=1": {"max_ahead": 1},
    "max_ahead=3": {"max_ahead": 3},
}


simulator = load_benchmark("simulate")


class Slow(ToolEnv):
    """Takes the time of its task: most take a few seconds, some a minute."""

    async def start(self, n: int) -> str:
        self.random = Random(n)
        await asyncio.sleep(1.0)
        return "go"

    async def reward(self, answer: str) -> float:
        await asyncio.sleep(self.random.lognormvariate(1.0, 1.2))
        return float(len(answer) % 2)

    async def close(self) -> None: ...


class SlowEngine(ScriptedEngine):
    """Answers after a time that grows with the length of the answer and with the other requests."""

    model: LlamaForCausalLM
    trained_by = None
    running = 0

    @contextmanager
    def updating(self, version):
        yield
        self.weights_version = version

    def weights_updated(self, version=None):
        self.weights_version = version
        return version

    async def generate(self, *args, **options):
        self.running += 1
        load = self.running
        done = await super().generate(*args, **options)
        await asyncio.sleep(len(done.token_ids) / FULL_SPEED * (1 + load / HALF_LOAD))
        self.running -= 1
        return done


def measured(tmp_path, monkeypatch, options, *, concurrency: int = 1000):
    """Return the episodes and the metrics of a training."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).eval()
    random, episodes, slowly = Random(1), [], []
    engine = SlowEngine(lambda request: "x" * random.randint(2, 16), tokenizer=byte_tokenizer())
    engine.model = copy.deepcopy(model)

    async def at_once(work):
        if getattr(work, "func", None) in slowly:
            await asyncio.sleep(TRAIN_S)
        return work()

    modules = ("trainer", "loop.sync", "loop.stream", "loop.usable", "loop.held_out")
    trainer = GRPOTrainer(
        GRPOConfig(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            groups_per_step=GROUPS,
            num_generations=MEMBERS,
            learning_rate=1e-4,
            **options,
        ),
        model=model,
        engine=engine,
        tokenizer=byte_tokenizer(),
        envs=EnvSpec.of("test/Slow-v0", Slow, tasks=[{"n": n} for n in range(200)]),
        limits=ae.RunLimits(max_turns=1, max_tokens_per_turn=20),
        runner=ae.RunnerOptions(concurrency=concurrency),
        callbacks=Callbacks(on_trajectory=episodes.append),
    )
    trainer.step = lambda groups: step_of(trainer, groups)
    # A synchronous training makes its step on the loop, so that its time is that of what follows.
    slowly += [trainer._train_on] if trainer.config.plays_ahead else [trainer._ledger.add]
    with monkeypatch.context() as patched:
        for module in modules:
            patched.setattr(f"agentenv.training.{module}.beside_the_loop", at_once)
        history = run_in_virtual_time(trainer.run, patched)
    return episodes, history


def step_of(trainer, groups):
    """Count a step as the trainer does, without the computation."""
    learner = trainer.learner
    metrics = episode_metrics(groups, weights_version=learner.weights_version)
    trainer.grpo.steps_done += 1
    learner.weights_version += 1
    return {"tokens/trained": 1.0, **metrics}


def mean_step(history) -> float:
    later = history[len(history) // 4 :]
    return sum(one["step_time"] for one in later) / len(later)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        return {
            name: measured(tmp_path_factory.mktemp("run"), patched, options) for name, options in WAYS.items()
        }


@pytest.fixture(scope="module")
def what(runs):
    episodes, history = runs["synchronous"]
    return simulator.recorded(
        episodes, history, groups_per_step=GROUPS, concurrency=1000, half_load=HALF_LOAD
    )


def simulated(what, **schedule):
    return simulator.simulate(what, half_load=HALF_LOAD, steps=200, repeats=2, **schedule)


def test_what_a_run_records_is_what_it_spent(what):
    assert what.train_s == pytest.approx(TRAIN_S)
    assert len(what.groups) == STEPS * GROUPS
    assert all(len(members) == MEMBERS for members in what.groups)
    assert all(one.before_s == pytest.approx(1.0) for members in what.groups for one in members)
    per_token = [one.turns[0][0] for members in what.groups for one in members]
    assert min(per_token) >= 2 / FULL_SPEED * 0.9
    assert max(per_token) <= 17 / FULL_SPEED * 1.3


@pytest.mark.parametrize("name", WAYS)
def test_a_schedule_is_foretold_from_the_run_of_another(runs, what, name):
    options = WAYS[name]

    foretold = simulated(what, **options)

    assert foretold.step_s == pytest.approx(mean_step(runs[name][1]), rel=0.2)
    ages = [one["staleness/max"] for one in runs[name][1]]
    assert foretold.most_stale == max(ages)


def test_the_order_of_the_schedules_is_that_of_the_measured_runs(runs, what):
    names = ["synchronous", "max_ahead=1", "max_ahead=3"]

    real = [mean_step(runs[name][1]) for name in names]
    foretold = [simulated(what, **options).step_s for options in ({}, {"max_ahead": 1}, {"max_ahead": 3})]

    assert real == sorted(real, reverse=True)
    assert foretold == sorted(foretold, reverse=True)


def test_room_for_fewer_episodes_is_foretold(tmp_path, monkeypatch, what):
    _, history = measured(tmp_path, monkeypatch, {"max_ahead": 3}, concurrency=6)

    foretold = simulated(what, max_ahead=3, concurrency=6)

    assert foretold.step_s == pytest.approx(mean_step(history), rel=0.2)
    assert foretold.live <= 6
    assert foretold.step_s > simulated(what, max_ahead=3).step_s


def test_more_servers_and_workers_help_where_they_are_the_bound(what):
    crowded = simulated(what, max_ahead=8, concurrency=60, train_s=0.1)
    assert simulated(what, max_ahead=8, concurrency=60, train_s=0.1, servers=4).step_s < crowded.step_s

    computing = simulated(what, max_ahead=8, train_s=0.1, cpu_share=1.0)
    assert simulated(what, max_ahead=8, train_s=0.1, cpu_share=1.0, workers=4).step_s < computing.step_s / 2
    assert computing.step_s > crowded.step_s


def test_a_stored_run_is_read_and_its_table_printed(tmp_path, monkeypatch, capsys, runs):
    from agentenv.runs.store import RunWriter

    episodes, history = runs["max_ahead=1"]
    config = {
        "train": {"groups_per_step": GROUPS, "max_ahead": 1},
        "runner": {"concurrency": 32},
    }
    with RunWriter.create("test/Slow-v0", kind="train", runs_dir=tmp_path, config=config) as writer:
        for one in episodes:
            writer.append(one)
        lines = [simulator.json.dumps({"step": step, **one}) for step, one in enumerate(history, 1)]
        (writer.path / "metrics.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(
        sys, "argv", ["simulate", str(writer.path), "--steps", "20", "--json", str(tmp_path / "out.json")]
    )

    simulator.main()

    printed = capsys.readouterr().out
    rows = simulator.json.loads((tmp_path / "out.json").read_text())
    assert "the run's own" in printed
    assert rows["max_ahead=8"]["step_s"] <= rows["synchronous"]["step_s"]
    assert rows["the run's own"]["most_stale"] == 1
