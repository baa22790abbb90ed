"""The driver of a training on a server of the Tinker API is killed anywhere and resumed: no step is lost or doubled.

The server is the fake, which keeps its states in a folder. The driver kills itself by SIGKILL in the middle of a
request, before or after the server has done it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("tinker")

from agentenv.runs import find_run
from helpers.training import saved_tiny

pytestmark = pytest.mark.exhaustive

STEPS, EPISODES = 4, 6
MOMENTS = [
    (call, number, when)
    for call, number in (
        ("sample", 9),
        ("forward", 2),
        ("forward_backward", 2),
        ("optim_step", 2),
        ("save_state", 4),
        ("save_weights_for_sampler", 2),
    )
    for when in ("before", "after")
]
"""Twelve: the call, which one of its kind since the training began, and on which side of it."""


def drive(folder: str, model: str, moment: tuple[str, int, str] | None, words: list[str]) -> None:
    """Run the command of a user on the fake, in a process of its own."""
    os.chdir(folder)
    os.environ |= {"XDG_CACHE_HOME": f"{folder}/cache", "XDG_STATE_HOME": f"{folder}/state"}
    import tinker

    from agentenv.cli import main
    from helpers.fake_tinker import Server

    seen: Counter[str] = Counter()

    class Deadly(Server):
        def answer(self, call, work):
            seen[call] += 1
            now = moment is not None and (call, seen[call]) == moment[:2]
            if now and moment[2] == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            value = super().answer(call, work)
            if now:
                os.kill(os.getpid(), signal.SIGKILL)
            return value

    tinker.ServiceClient = Deadly(Path(folder) / "server", model).ServiceClient
    import sys

    sys.argv = ["agentenv", *words]
    with Path("said").open("a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        main()


def ended(*given) -> int | None:
    """Return how a driver ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.fake_tinker", "agentenv.training.run", "agentenv.cli"])
    process = context.Process(target=drive, args=given)
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_killed_driver_goes_on_where_it_was(tmp_path, model, moment):
    (tmp_path / "server").mkdir()
    (tmp_path / "echo.py").write_text(ENV)
    begin = ["train", "echo.py", "-m", f"tinker:{model}@http://127.0.0.1:1", "--steps", str(STEPS), *WORDS]
    assert ended(str(tmp_path), model, moment, begin) == -signal.SIGKILL, (tmp_path / "said").read_text()
    assert find_run("last", tmp_path / "runs").metrics()
    assert ended(str(tmp_path), model, None, ["train", "--resume", "last"]) == 0, (
        tmp_path / "said"
    ).read_text()
    run = find_run("last", tmp_path / "runs")
    assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))
    # Each step made one update, on the weights of the step before it.
    assert [row["weights_version"] for row in run.metrics()] == list(range(1, STEPS + 1))
    trained = Counter(note["step"] for note in run.annotations().values() if "step" in note)
    assert trained == dict.fromkeys(range(1, STEPS + 1), EPISODES)
    assert set(Counter((row.group_id, row.member) for row in run.summaries).values()) == {1}


ENV = """
import agentenv as ae

class Echo(ae.ToolEnv):
    def start(self, n: int) -> str:
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return len(set(answer)) / 10

ae.register("kills/Echo-v0", Echo, tasks=[{"n": n} for n in range(7)])
"""
WORDS = [
    "-k",
    "3",
    "--demos",
    "none",
    "-o",
    "groups_per_step=2",
    "-o",
    "max_turns=1",
    "-o",
    "max_tokens_per_turn=6",
    "-o",
    "learning_rate=0.01",
    "-o",
    "lora.r=4",
    "-o",
    "save_steps=1",
]
