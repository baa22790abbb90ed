"""Two trainings on one server: the second is refused, or takes the server over and ends the first."""

from __future__ import annotations

import asyncio
import copy
from contextlib import nullcontext

import pytest
import torch

import agentenv as ae
from agentenv.core import AgentEnvError, EngineError, TrainingFailed, UsageError
from agentenv.engine.labels import Label
from agentenv.engine.vllm import pool as pools
from agentenv.training.loop import usable
from agentenv.training.loop.callbacks import Callbacks
from agentenv.training.loop.sync import run_name
from agentenv.training.watch.warn import require_agreement
from helpers.model_server import model_server
from scenes import Lengths, numbered, saved_model, trainer
from unit.training.loop.test_sync import make_trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


class Vowels(Lengths):
    """Rewards vowels."""

    def reward(self, answer: str) -> float:
        return sum(letter in "aeiou" for letter in answer) / 10 + len(answer) / 100


def train(model: str, server, runs, *, on_metrics=None, task="Lengths", lora=None, **engine):
    settings = {} if lora is None else {"lora": lora}
    return ae.train(
        numbered({"Lengths": Lengths, "Vowels": Vowels}[task]),
        model,
        steps=2,
        group_size=4,
        demos="none",
        runs_dir=runs,
        limits={"max_turns": 1, "max_tokens_per_turn": 6},
        engine={"retry_s": 20.0, **engine},
        train={
            "engine": server if isinstance(server, str) else f"{server.url}/v1",
            "groups_per_step": 2,
            "dtype": "float32",
            "learning_rate": 0.01,
            **settings,
        },
        on_metrics=on_metrics,
    )


def test_a_name_is_that_of_one_directory_alone(tmp_path):
    names = {run_name(str(tmp_path / place / "run 1")) for place in ("a", "b")}

    assert len(names) == 2
    assert all(name.startswith("run-1-") for name in names)
    assert run_name(str(tmp_path / "a" / "run 1")) in names


def test_a_second_training_on_a_server_is_refused_and_the_first_is_what_it_is_alone(model, tmp_path):
    refused: list[AgentEnvError] = []

    def begin_another(step, metrics):
        if step == 1:
            with pytest.raises(EngineError) as caught:
                train(model, server, tmp_path / "second")
            refused.append(caught.value)

    with model_server(model) as server:
        alone = train(model, server, tmp_path / "alone")
        first = train(model, server, tmp_path / "first", on_metrics=begin_another)
        owner = Label.read(server.version)

    assert "has the weights of the training" in str(refused[0])
    assert "engine.take_over=true" in str(refused[0])
    assert owner == Label(2)  # the training has ended, and the server may have another
    for name in ("reward", "loss", "grad_norm"):
        assert [step[name] for step in first.history] == [step[name] for step in alone.history]


def test_two_trainings_of_adapters_on_one_server_learn_as_each_does_alone(model, tmp_path):
    lora = {"lora": {"r": 4}}
    second: list[ae.TrainResult] = []

    def begin_another(step, metrics):
        if step == 1:
            second.append(train(model, server, tmp_path / "second", task="Vowels", **lora))

    with model_server(model) as server:
        alone = [
            train(model, server, tmp_path / f"alone-{task}", task=task, **lora)
            for task in ("Lengths", "Vowels")
        ]
        first = train(model, server, tmp_path / "first", on_metrics=begin_another, **lora)
        asked = {body["model"].rpartition("@")[0] for body in server.seen}
        left = dict(server.adapters)

    assert len({name for name in asked if name}) == 4  # each training sampled from its own adapter
    assert (left, server.version) == ({}, "default")
    for shared, lone in zip((first, *second), alone, strict=True):
        assert len(shared.history) == 2
        for name in ("reward", "loss", "grad_norm"):
            assert [step[name] for step in shared.history] == [step[name] for step in lone.history]
        assert all(step["mismatch/k3"] < 1e-6 for step in shared.history)


def test_a_training_that_is_taken_over_ends_and_the_other_goes_on(model, tmp_path, monkeypatch):
    monkeypatch.setattr(usable, "WAITS_S", (0.0,) * len(usable.WAITS_S))

    def take_over(step, metrics):
        if step == 1:
            server.version = str(Label(1, "elsewhere-1", "today"))  # as if another machine had pushed

    with model_server(model) as server:
        with pytest.raises(EngineError, match=r"the weights of the training elsewhere-1 since today"):
            train(model, server, tmp_path / "first", on_metrics=take_over)
        with pytest.raises(EngineError, match="elsewhere-1"):
            train(model, server, tmp_path / "second")
        others = train(model, server, tmp_path / "third", take_over=True).history

    assert [step["mismatch/k3"] < 1e-6 for step in others] == [True, True]


@pytest.mark.parametrize("own_model", [False, True])
def test_a_second_training_on_an_engine_of_this_process_is_refused_while_the_first_runs(own_model):
    first = make_trainer(own_model=own_model, max_steps=1)
    first.rollouts  # opens the engine
    model = copy.deepcopy(first.model) if own_model else first.model
    second = trainer(model=model, engine=first.engine, max_steps=1)
    refused: list[str] = []

    def begin_another(step, metrics):
        with pytest.raises(UsageError, match="plays for another training") as caught:
            second.train()
        refused.append(str(caught.value))

    first._callbacks = Callbacks(on_metrics=begin_another)
    first.train()
    second.train()

    assert len(refused) == 1
    assert (first.steps_done, second.steps_done) == (1, 1)


def test_a_training_stops_when_its_tokens_were_sampled_from_other_weights(monkeypatch):
    trainer = make_trainer(own_model=True, max_steps=8, learning_rate=1e-4)
    with torch.no_grad():
        for weight in trainer.engine.model.parameters():
            weight.add_(torch.randn_like(weight))

    def claim(engine, learner):
        with engine.updating(learner.weights_version):
            pass  # says that it has the weights, which no check at a push would show

    monkeypatch.setattr("agentenv.training.loop.sync.sync_engine", claim)

    with pytest.raises(TrainingFailed, match="of 3 steps were not sampled from the weights in training: k3"):
        trainer.train()

    assert trainer.steps_done == 3


ODD, RIGHT = {"mismatch/k3": 5.0}, {"mismatch/k3": 1e-3}
STALE = ODD | {"staleness/max": 1.0}


@pytest.mark.parametrize(
    ("history", "ends"),
    [
        ([ODD, ODD, RIGHT, ODD, ODD], False),
        # Tokens of weights that have been trained since end no training.
        ([ODD, STALE, STALE, STALE, ODD], False),
        ([ODD, ODD, STALE, ODD], True),
        ([RIGHT, ODD, ODD, ODD], True),
    ],
)
def test_steps_that_all_disagree_end_a_training_and_one_odd_batch_does_not(history, ends):
    with pytest.raises(TrainingFailed) if ends else nullcontext():
        require_agreement(history)


def test_the_servers_of_a_training_may_be_exchanged_while_it_runs(model, tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "LIST_EVERY_S", 0.05)
    listed = tmp_path / "servers.txt"

    def exchange(step, metrics):
        if step == 1:
            listed.write_text(f"{second.url}/v1\n")
            first.frozen = asyncio.Event()  # so that the next step can only be played on the second

    with model_server(model) as first, model_server(model) as second:
        listed.write_text(f"{first.url}/v1\n")
        alone = train(model, first, tmp_path / "alone")
        first.version = "default"
        moved = train(model, f"servers:{listed}", tmp_path / "moved", on_metrics=exchange, hang_s=0.5)

    assert len(second.seen) > 8
    assert Label.read(second.version) == Label(2)
    for name in ("reward", "loss", "grad_norm"):
        assert [step[name] for step in moved.history] == [step[name] for step in alone.history]
