"""Every tracker holds the numbers of `metrics.jsonl`: written by a run, read back from its own files."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentenv.core import DependencyMissing, UsageError
from agentenv.training import GRPOConfig
from agentenv.training.loop.journal import Journal
from agentenv.training.watch import Trackers

RUN = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from scenes import trainer

trainer(Path(sys.argv[1]), report_to=tuple(sys.argv[2:]), groups_per_step=1).train()
"""


def run(directory: Path, tracker: str) -> dict[int, dict[str, float]]:
    """Train three steps with a tracker; return what `metrics.jsonl` says."""
    environment = {
        **os.environ,
        "HOME": str(directory),
        "TRACKIO_DIR": str(directory / "trackio"),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(directory / "run"), tracker],
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return {line.pop("step"): {name: v for name, v in line.items() if v is not None} for line in lines}


def assert_same(
    held: dict[int, dict[str, float]], truth: dict[int, dict[str, float]], *, relative: float
) -> None:
    assert set(truth) == {1, 2, 3}
    assert "reward" in truth[1]
    for step, metrics in truth.items():
        for name, value in metrics.items():
            assert held[step][name] == pytest.approx(value, rel=relative, abs=1e-30), (step, name)


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.slow
def test_tensorboard_holds_the_numbers_of_the_run(tmp_path):
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    truth = run(tmp_path, "tensorboard")

    held: dict[int, dict[str, float]] = {}
    for file in (tmp_path / "run" / "tensorboard").glob("events*"):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                held.setdefault(event.step, {})[value.tag] = value.tensor.float_val[0]
    assert_same(held, truth, relative=1e-6)  # TensorBoard keeps float32


@pytest.mark.slow
def test_trackio_holds_the_numbers_of_the_run(tmp_path):
    needs("trackio")

    truth = run(tmp_path, "trackio")

    with closing(sqlite3.connect(tmp_path / "trackio" / "agentenv.db")) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    assert {name for name, _, _ in rows} == {"run"}
    held = {step: json.loads(metrics) for _, step, metrics in rows}
    assert_same(held, truth, relative=1e-12)


@pytest.mark.slow
def test_wandb_offline_holds_the_numbers_of_the_run(tmp_path):
    needs("wandb")

    truth = run(tmp_path, "wandb")

    (file,) = (tmp_path / "run").rglob("*.wandb")
    held: dict[int, dict[str, float]] = {}
    for row in wandb_rows(file.read_bytes()):
        held.setdefault(int(row["_step"]), {}).update(row)
    assert_same(held, truth, relative=1e-12)


def wandb_rows(data: bytes) -> list[dict[str, float]]:
    """Read the history of an offline run: blocks of 32 KiB, each record with its sum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows: list[dict[str, float]] = []
    place, parts = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record.FromString(parts)
            parts = b""
            items = {item.key or "/".join(item.nested_key): item for item in record.history.item}
            if items:
                rows.append({name: json.loads(item.value_json) for name, item in items.items()})
    return rows


class Broken:
    """A tracker whose server has gone."""

    def log(self, metrics, step):
        raise ConnectionError("gone")

    def finish(self):
        raise AssertionError("finished after it was dropped")


def test_a_tracker_that_fails_is_given_up_and_the_run_goes_on(tmp_path, caplog):
    trackers = Trackers((), directory=tmp_path, config={})
    trackers._runs["wandb"] = Broken()

    trackers.log(1, {"reward": 1.0})
    trackers.log(2, {"reward": 1.0})
    trackers.close()

    assert caplog.text.count("tracker wandb failed and is dropped at step 1: ConnectionError: gone") == 1


class Endless(Broken):
    """A tracker that takes everything and cannot end."""

    def log(self, metrics, step):
        pass

    def finish(self):
        raise ConnectionError("gone at last")


def journal(directory) -> Journal:
    learner = SimpleNamespace(world=SimpleNamespace(rank=0))
    config = GRPOConfig(output_dir=str(directory))
    made = Journal(SimpleNamespace(config=config, learner=learner, steps_done=0), {})
    made._trackers = Trackers((), directory=directory, config={})
    made._trackers._runs = {"wandb": Endless(), "trackio": Endless()}
    return made


def test_a_tracker_that_cannot_end_does_not_fail_a_finished_run(tmp_path, caplog):
    with journal(tmp_path):
        pass

    assert "tracker wandb could not finish its run: ConnectionError: gone at last" in caplog.text
    assert "tracker trackio could not finish its run" in caplog.text


def test_a_tracker_that_cannot_end_does_not_hide_why_the_run_failed(tmp_path):
    with pytest.raises(ValueError, match="the run's own"), journal(tmp_path):
        raise ValueError("the run's own")


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(UsageError, match="unknown tracker 'mlflow'"):
        Trackers(("mlflow",), directory=tmp_path, config={})


def test_a_tracker_that_is_not_installed_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DependencyMissing, match="track"):
        Trackers(("wandb",), directory=tmp_path, config={})
