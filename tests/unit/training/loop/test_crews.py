"""Workers that play the episodes of a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import agentenv as ae
from agentenv.cli import main
from agentenv.core import Trajectory, UsageError
from agentenv.runs import RunWriter
from agentenv.training import GRPOConfig, GRPOTrainer, TrainResult
from helpers.model_server import model_server
from helpers.worker_runs import DEADLY, truth
from scenes import saved_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(
    model: str,
    directory: str,
    *,
    steps: int = 3,
    on_metrics: Callable[[int, Mapping[str, float]], None] | None = None,
    **settings: Any,
) -> TrainResult:
    """Train on what a server of its own plays; the rewards are the lengths of the answers."""
    Path("lengths.py").write_text("def length(trajectory):\n    return len(trajectory.answer) / 10\n")
    with model_server(model) as server:
        options: dict[str, Any] = {
            "groups_per_step": 2,
            "learning_rate": 0.01,
            "engine": f"{server.url}/v1",
            **settings,
        }
        return ae.train(
            DEADLY,
            model,
            steps=steps,
            on_metrics=on_metrics,
            group_size=2,
            train=options,
            limits={"max_turns": 1, "max_tokens_per_turn": 6},
            runner={"score": "lengths.py:length"},
            demos="none",
            runs_dir=directory,
        )


@pytest.mark.slow
def test_two_workers_play_a_training_as_its_own_process_does(model: str, monkeypatch: pytest.MonkeyPatch):
    alone = trained(model, "alone", eval_tasks=2)
    encoded = []
    append = RunWriter.append

    def watched(writer: RunWriter, trajectory: Trajectory, line: object = None) -> object:
        encoded.append(line is not None)
        return append(writer, trajectory, line)

    monkeypatch.setattr(RunWriter, "append", watched)
    together = trained(model, "together", eval_tasks=2, workers=2)

    assert encoded.count(True) == 3 * 2 * 2  # the workers encoded the episodes that were trained on

    assert truth(together.run) == truth(alone.run)
    assert {version for one in together.run for version in one.weights_versions} == {0, 1, 2}
    assert [line["reward"] for line in together.history] == [line["reward"] for line in alone.history]
    assert together.run.info.config["train"]["workers"] == 2
    assert {"driver", "w1", "w2"} <= {row["worker"] for row in together.run.workers()}


def test_further_fields_of_the_configuration_are_arguments_too(model: str):
    with pytest.raises(UsageError, match="did you mean 'workers'"):
        ae.train(DEADLY, model, worker=2)
    for train in (None, {}, GRPOConfig(learning_rate=0.1)):
        with pytest.raises(UsageError, match="cannot be used with workers"):
            ae.train(DEADLY, model, train=train, workers=2)


def test_workers_need_a_server(model: str):
    with pytest.raises(UsageError, match="cannot be used with workers"):
        ae.train(DEADLY, model, workers=2)
    assert not Path("runs").exists()

    trainer = GRPOTrainer(GRPOConfig(model=model, workers=2), envs=DEADLY)
    with pytest.raises(UsageError, match="the model is in the trainer's process"):
        trainer.evaluate()


def test_the_command_line_names_workers(model: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["train", DEADLY, "-m", model, "--workers", "2"])
    with pytest.raises(SystemExit):
        main(["train", DEADLY, "-m", model, "-o", "workers=2"])

    assert capsys.readouterr().err.count("cannot be used with workers") == 2
