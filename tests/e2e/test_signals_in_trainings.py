"""Trainings that get SIGTERM at random moments: each ends soon, and what was finished is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from agentenv.runs import find_run
from agentenv.runs.store import RunStatus
from helpers.training import saved_tiny
from helpers.waiting import PATIENCE_S

PHASES = ("warm-up", "play", "update", "save")
STEPS, DEMOS = 6, 8

# Loads once what a first training has loaded, and then makes a copy of itself for each training, because loading
# takes longer than training. A copy tells where it is in a pipe; the signal comes after the number of entries and
# the seconds of its case.
PROGRAM = """
import contextlib, importlib, json, os, signal, sys, time
import agentenv as ae
from agentenv.training import GRPOTrainer
from agentenv.training.learners.torch.learner import TorchLearner

model, cases, patience_s = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])

tells = []

class Echo(ae.ToolEnv):
    def start(self, n: int) -> str:
        tells[0]("play")
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return len(answer) / 10

ae.register("signals/Echo-v0", Echo, tasks=[{"n": n} for n in range(8)])

def told(kind, name, phase, told_to):
    method = getattr(kind, name)
    def telling(self, *args, **options):
        told_to(phase(self))
        return method(self, *args, **options)
    setattr(kind, name, telling)

def say(messages, task, random):
    return {"role": "assistant", "content": "01234"}

def train(case, pipe):
    tell = lambda phase: os.write(pipe, f"{phase}\\n".encode())
    of_learner = lambda self: "warm-up" if self._separate else "update"
    told(TorchLearner, "forward_backward", of_learner, tell)
    told(TorchLearner, "optim_step", of_learner, tell)
    tells.append(tell)
    told(GRPOTrainer, "save_step", lambda self: "save", tell)
    settings = {"groups_per_step": 2, "learning_rate": 0.01, "save_steps": case["save_steps"],
                "max_ahead": case["max_ahead"], "tokens_per_micro_batch": 64}
    ae.train("signals/Echo-v0", model, steps=case["steps"], group_size=2, demos=say, num_demos=case["demos"],
             seed=case["seed"], train=settings, limits={"max_turns": 1, "max_tokens_per_turn": 12})

reads, writes = os.pipe()
if not os.fork():
    train({**cases[0], "steps": 1, "seed": -1}, os.open(os.devnull, os.O_WRONLY))
    os.write(writes, " ".join(sys.modules).encode())
    os._exit(0)
os.close(writes)
with os.fdopen(reads) as names:
    for name in names.read().split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)

for case in cases:
    os.makedirs(case["directory"])
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        os.chdir(case["directory"])
        said = os.open("said", os.O_CREAT | os.O_WRONLY)
        os.dup2(said, 1), os.dup2(said, 2)
        code = 1
        try:
            train(case, writes)
            code = 0
        except SystemExit as ended:
            code = ended.code
        finally:
            os._exit(code)
    os.close(writes)
    seen = 0
    with os.fdopen(reads) as lines:
        for line in lines:
            seen += line.strip() == case["phase"]
            if seen == case["entry"]:
                break
        time.sleep(case["delay_s"])
        os.kill(child, signal.SIGTERM)
        over, until = (0, 0), time.monotonic() + patience_s
        if case["again_s"]:
            time.sleep(case["again_s"])
            os.kill(child, signal.SIGTERM)
        while over[0] == 0 and time.monotonic() < until:
            time.sleep(0.01)
            over = os.waitpid(child, os.WNOHANG)
        if over[0] == 0:
            os.kill(child, signal.SIGKILL)
            over = os.waitpid(child, 0)
    print(json.dumps({**case, "code": os.waitstatus_to_exitcode(over[1])}), flush=True)
"""


def cases_of(number: int, root: Path) -> list[dict[str, object]]:
    """Draw trainings that are ended in each phase in turn."""
    cases: list[dict[str, object]] = []
    for seed in range(number):
        random, phase = Random(seed), PHASES[seed % len(PHASES)]
        cases.append(
            {
                "seed": seed,
                "directory": str(root / str(seed)),
                "phase": phase,
                "steps": STEPS,
                "demos": DEMOS * 4,  # each is imitated four times
                "entry": random.randint(
                    1, {"warm-up": 4, "play": DEMOS + 4 * (STEPS - 2)}.get(phase, STEPS - 2)
                ),
                "delay_s": random.random() * random.choice([0.002, 0.05]),
                "again_s": random.choice([0.0, 0.0, random.random() * 0.05]),
                "save_steps": 1 if phase == "save" else random.choice([0, 1, 2]),
                "max_ahead": random.choice([0, 0, 1]),
            }
        )
    return cases


@pytest.mark.parametrize(
    "number", [pytest.param(8, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.exhaustive)]
)
def test_sigterm_at_any_moment_ends_a_training_and_loses_nothing_finished(tmp_path, number):
    cases = cases_of(number, tmp_path / "runs")
    words = [saved_tiny(tmp_path / "tiny"), json.dumps(cases), str(PATIENCE_S)]
    with (tmp_path / "said").open("w") as said:
        played = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            check=True,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
    ended = [json.loads(line) for line in played.stdout.splitlines()]

    assert len(ended) == number
    # A second signal may come when the run is closed and the process has its own handler again.
    assert not [case for case in ended if case["code"] not in {143, -15}], played.stdout
    for case in ended:
        run = find_run("last", Path(case["directory"]) / "runs")
        done = [row["step"] for row in run.metrics() if "episodes" in row]
        saved = sorted(int(path.name.removeprefix("step-")) for path in run.path.glob("checkpoints/step-*"))
        assert run.status in {RunStatus.INTERRUPTED, RunStatus.FINISHED}, case
        assert max(saved, default=0) == max(done, default=0), case
        assert saved or case["phase"] in {"warm-up", "play"}, case
        trained = [note["step"] for note in run.annotations().values() if "step" in note]
        assert sorted(set(trained)) == list(range(1, max(done, default=0) + 1)), case
