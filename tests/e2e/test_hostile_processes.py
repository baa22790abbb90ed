"""Code of an environment that forks, cancels everything or is told to end: the run stays the user's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.runs import find_run
from agentenv.runs.store import RunStatus
from helpers.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process with threads")

ENV = """
import asyncio, os, pathlib, sys
import agentenv as ae

class Odd(ae.ToolEnv):
    def start(self, n: int) -> str:
        self.n = n
        return "Look."

    @ae.tool
    {tool} look(self) -> str:
        '''Look.'''
        {in_tool}
        return "nothing"

    {reward} reward(self, answer: str) -> float:
        {in_reward}
        return 1.0

    def close(self) -> None:
        pathlib.Path("closed").touch()

ae.register("odd/Odd-v0", Odd, tasks=[{{"n": n}} for n in range(20)])
"""


def evaluation(tmp_path: Path, *words: str, tool: str = "def", reward: str = "def", **code: str) -> list[str]:
    code = {"in_tool": "pass", "in_reward": "pass", **code}
    (tmp_path / "odd.py").write_text(ENV.format(tool=tool, reward=reward, **code))
    return [sys.executable, "-m", "agentenv", "eval", "odd.py", "-m", "mock", "-n", "20", "--json", *words]


FORKS = "if self.n % 4 == 0 and os.fork() == 0: {}"


@pytest.mark.parametrize("what", ["pass", "sys.exit(3)", "1 / 0"])
@pytest.mark.parametrize(
    "where",
    [{"in_tool"}, {"in_reward"}, {"in_tool", "tool"}, {"in_reward", "reward"}],
    ids=["tool", "reward", "async tool", "async reward"],
)
def test_the_copy_that_a_fork_makes_ends_with_the_code_that_made_it(tmp_path, what, where):
    code = {name: FORKS.format(what) if name.startswith("in") else "async def" for name in where}
    command = evaluation(tmp_path, **code)

    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )  # returns only when every copy has closed its output

    assert (done.returncode, done.stderr.count("error")) == (0, 0), done.stderr
    assert json.loads(done.stdout)["reward"]["mean"] == 1.0
    run = find_run("last", tmp_path / "runs")
    assert (run.status, len(run)) == (RunStatus.FINISHED, 20)


def test_a_tool_that_cancels_every_task_ends_the_run_in_words_and_it_is_resumed(tmp_path):
    cancels = "if self.n > 9 and not os.path.exists('calm'): [t.cancel() for t in asyncio.all_tasks()]"
    command = evaluation(tmp_path, "-o", "concurrency=1", tool="async def", in_tool=cancels)

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "code of an environment, a tool or a reward has cancelled tasks" in done.stderr
    run = find_run("last", tmp_path / "runs")
    assert (run.status, 0 < len(run) < 20) == (RunStatus.FAILED, True)
    (tmp_path / "calm").touch()
    again = [*command[:4], "--resume", "last", "--json"]
    subprocess.run(again, cwd=tmp_path, capture_output=True, timeout=120, check=True)
    assert len(find_run("last", tmp_path / "runs")) == 20


@pytest.mark.parametrize("ignored", ["", "trap '' INT; "], ids=["in a terminal", "in the background"])
def test_sigterm_ends_an_evaluation_as_ctrl_c_does_and_closes_its_environments(tmp_path, ignored):
    waits = "pathlib.Path('began').touch(); await asyncio.Event().wait()"
    command = evaluation(tmp_path, tool="async def", in_tool=waits)
    running = subprocess.Popen(
        ["sh", "-c", f'{ignored}exec "$@"', "sh", *command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until((tmp_path / "began").exists, seconds=60)
    running.send_signal(signal.SIGTERM)
    out, err = running.communicate(timeout=60)

    assert running.returncode == 130, err
    assert json.loads(out)["interrupted"]
    assert (tmp_path / "closed").exists()
    assert find_run("last", tmp_path / "runs").status is RunStatus.INTERRUPTED
