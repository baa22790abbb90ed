"""Trainings that are ended at random moments and resumed: no finished step and no episode is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random

import pytest

from agentenv.runs import find_run
from agentenv.runs.store import RunStatus
from helpers.model_server import model_server
from helpers.waiting import wait_until
from scenes import saved_model

pytestmark = pytest.mark.exhaustive

STEPS = 5
WAYS = ("sync", "stream", "workers", "ranks")
CAUSES = ("SIGTERM", "SIGKILL", "exception")
MOMENTS = 5
"""Random moments of each way and cause, which makes sixty."""

ENV = """
import agentenv as ae

class Echo(ae.ToolEnv):
    def start(self, n: int) -> str:
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return len(answer) / 10

ae.register("kills/Echo-v0", Echo, tasks=[{"n": n} for n in range(7)])
"""

# The program of a rank. An exception is raised in the update of the step that FAILS_IN names.
PROGRAM = """
import os, sys
from agentenv.cli import main
from agentenv.training.learners.torch.learner import TorchLearner

fails = os.environ.get("FAILS_IN", "")
compute = TorchLearner.forward_backward

def forward_backward(self, *args, **options):
    loss = compute(self, *args, **options)
    if fails == f"{os.environ.get('RANK', '0')} {self.weights_version}":
        raise RuntimeError("this update fails")
    return loss

TorchLearner.forward_backward = forward_backward
main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp("tiny"))


@contextmanager
def options_of(way: str, model: str) -> Generator[list[str]]:
    """Yield the settings of a way to train; workers need a server, which lives as long as this context."""
    with model_server(model) if way == "workers" else nullcontext() as server:
        settings = {"stream": {"max_ahead": 1}, "workers": {"workers": 2}}.get(way, {})
        if server is not None:
            settings["engine"] = f"{server.url}/v1"
        yield [word for name, value in settings.items() for word in ("-o", f"train.{name}={value}")]


def launch(directory: Path, way: str, *words: str, fails_in: str = "") -> subprocess.Popen[str]:
    """Start `agentenv train` in one process, or in two that train together."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "0"]
    with (directory / "said").open("a") as said:
        return subprocess.Popen(
            [sys.executable, *(ranks if way == "ranks" else []), "program.py", "train", *words],
            cwd=directory,
            env={**os.environ, "FAILS_IN": fails_in, "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=said,
            text=True,
            start_new_session=True,
        )


def trainers_of(process: subprocess.Popen[str], way: str) -> list[int]:
    """Return the ids of the processes that train."""
    if way != "ranks":
        return [process.pid]
    rows = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], check=True, capture_output=True, text=True).stdout
    pairs = [tuple(map(int, row.split())) for row in rows.splitlines()]
    return sorted(pid for pid, parent in pairs if parent == process.pid)


def finished(directory: Path) -> list[int]:
    """Return the finished steps that the run has recorded."""
    lines = [
        line for file in directory.glob("runs/*/metrics.jsonl") for line in file.read_text().splitlines()
    ]
    return [row["step"] for row in map(json.loads, lines) if "episodes" in row]


@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("way", WAYS)
def test_a_training_that_is_ended_anywhere_goes_on_from_its_last_step(tmp_path, model, way, cause, moment):
    random = Random(f"{way} {cause} {moment}")
    (tmp_path / "kills.py").write_text(ENV)
    (tmp_path / "program.py").write_text(PROGRAM)
    save_steps = random.choice([0, 1, 2])
    settings = {"groups_per_step": 2, "max_turns": 1, "max_tokens_per_turn": 6, "learning_rate": 0.01}
    settings["save_steps"] = save_steps
    plain = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    begin = ["kills.py", "-m", model, "-k", "2", "--demos", "none", "--steps", str(STEPS), *plain]
    step, rank = random.randrange(1, STEPS), random.randrange(2) if way == "ranks" else 0

    with options_of(way, model) as options:
        fails_in = f"{rank} {step}" if cause == "exception" else ""
        process = launch(tmp_path, way, *begin, *options, fails_in=fails_in)
        if cause != "exception":
            wait_until(lambda: step in finished(tmp_path) or process.poll() is not None, seconds=240)
            time.sleep(random.random() * 0.3)
            for pid in trainers_of(process, way)[rank : rank + 1]:
                os.kill(pid, getattr(signal, cause))
        process.wait(timeout=240)
        said = (tmp_path / "said").read_text()

        done = finished(tmp_path)
        run = find_run("last", tmp_path / "runs")
        saved = sorted(int(path.name.removeprefix("step-")) for path in run.path.glob("checkpoints/step-*"))
        if cause != "SIGKILL" or way == "ranks":  # the other rank saves then
            assert max(saved, default=0) >= max(done, default=0) > 0, said
        if cause == "SIGKILL" and not saved:
            assert (save_steps, len(run)) >= (0, 4 * len(done)), said
            return  # nothing was saved yet, and nothing can be when a process is killed
        whole = len(done) == STEPS and run.status is RunStatus.FINISHED
        if not whole:
            process = launch(tmp_path, way, "--resume", "last", *options[2:] if way == "workers" else [])
            assert process.wait(timeout=240) == 0, (tmp_path / "said").read_text()

    run = find_run("last", tmp_path / "runs")
    assert run.status is RunStatus.FINISHED
    trained = Counter(note["step"] for note in run.annotations().values() if "step" in note)
    assert trained == dict.fromkeys(range(1, STEPS + 1), 4)
    assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))
    members = Counter((row.group_id, row.member) for row in run.summaries)
    assert set(members.values()) == {1}
