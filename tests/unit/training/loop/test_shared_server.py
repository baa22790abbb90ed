"""Two trainings on one server: the second is refused, or takes the server over and ends the first."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import agentenv as ae
from agentenv.core import AgentEnvError, EngineError, TrainingFailed
from agentenv.engine.labels import Label
from agentenv.training.loop.sync import run_name
from agentenv.training.watch.warn import require_agreement
from helpers.model_server import model_server
from scenes import Lengths, numbered, saved_model
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
