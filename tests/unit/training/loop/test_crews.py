"""Workers that play the episodes of a training."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentenv as ae
from agentenv.cli import main
from agentenv.core import Trajectory, UsageError
from agentenv.runs import RunWriter, find_run
from agentenv.training import GRPOConfig, GRPOTrainer, TrainResult
from agentenv.workers import head as heads
from agentenv.workers.worker import ClusterLost
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


@pytest.mark.slow
def test_workers_play_ahead_and_name_the_weights_of_each_token(model: str):
    result = trained(model, "ahead", workers=2, max_ahead=2)

    trained_on = [one for one in result.run if one.trainable]
    assert result.steps_done == 3
    assert Counter(Counter(one.group_id for one in result.run).values()) == {2: 6}  # each group once
    assert len(trained_on) >= 3 * 2 * 2
    assert {version for one in trained_on for version in one.weights_versions} <= {0, 1, 2, 3}
    assert all(line["mismatch/abs_max"] < 0.05 for line in result.history if not line["staleness/max"])


@pytest.mark.slow
def test_a_training_is_resumed_with_another_number_of_workers(model: str):
    first = trained(model, "runs", save_steps=1)

    with model_server(model) as server:
        url, old = f"{server.url}/v1", first.run.info.config["train"]["engine"]
        record = Path(first.run.path, "run.json")
        record.write_text(record.read_text().replace(old, url))
        plans = []
        again = ae.train(resume=first.run.path, steps=4, workers=1, trust=True, on_start=plans.append)

    assert (plans[0].config.workers, again.steps_done, len(again.history)) == (1, 4, 1)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch):
    """A Ray cluster of its own, whose head may be killed."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # everything listens on loopback
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray: Any = pytest.importorskip("ray", reason="ray is not installed (pip install 'agentenv-rl[ray]')")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=node)
    try:
        heads.let_ray_wait()
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray's own sockets
@pytest.mark.filterwarnings("ignore::FutureWarning:ray.*")
def test_a_training_whose_cluster_goes_is_saved_and_says_how_to_continue(
    cluster: Any, model: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(heads, "GONE_S", 4.0)
    done = []

    def kill_the_head(step: int, _: Mapping[str, float]) -> None:
        if not done:
            psutil.Process(cluster.head_node.all_processes["gcs_server"][0].process.pid).kill()
        done.append(step)

    with pytest.raises(ClusterLost, match="the head of the Ray cluster") as told:
        trained(model, "runs", steps=10_000, on_metrics=kill_the_head, workers=1, ray=cluster.address)

    run = find_run("last")
    assert told.value.remedy.endswith(f"continue with: agentenv train --resume {run.id}")
    assert Path(run.path, "checkpoints", f"step-{done[-1]}").is_dir()
    assert "the head of the Ray cluster" in run.info.note


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
