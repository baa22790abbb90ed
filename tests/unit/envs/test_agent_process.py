"""A program's exit ends its run, and nothing that it started outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import agentenv as ae
from agentenv.core import UsageError
from agentenv.envs.agent_process import AgentFailed, run_agent_process
from helpers.waiting import PATIENCE_S, until
from scenes import groups_of, runner, spec_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")

DAEMON = "setsid sh -c 'echo $$ > %s; trap \"\" TERM; exec sleep 1000' & "
"""Starts a process in a session of its own that keeps standard output and does not end politely."""


def gone(pid_file: Path) -> bool:
    stat = Path(f"/proc/{pid_file.read_text().strip()}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def run(script: str, folder: Path) -> str:
    return await run_agent_process(["sh", "-c", script], {"PATH": os.environ["PATH"]}, folder, folder)


async def test_the_exit_of_a_program_ends_its_run_though_a_server_keeps_its_output(tmp_path: Path):
    async with asyncio.timeout(PATIENCE_S):
        said = await run("sleep 1000 & echo $! > pid; echo done", tmp_path)

    assert said == "done\n"
    assert gone(tmp_path / "pid")


async def test_a_process_in_a_session_of_its_own_ends_with_the_program(tmp_path: Path):
    pid = tmp_path / "pid"

    await run(DAEMON % pid + f"while [ ! -s {pid} ]; do sleep 0.01; done; echo done", tmp_path)

    assert gone(pid)


async def test_a_run_that_is_cancelled_leaves_nothing(tmp_path: Path):
    pid = tmp_path / "pid"
    running = asyncio.create_task(run(DAEMON % pid + "sleep 1000", tmp_path))
    await until(lambda: pid.exists() and pid.read_text().strip())

    running.cancel()
    await asyncio.wait({running})

    assert gone(pid)


async def test_the_exit_code_of_a_program_is_told(tmp_path: Path):
    with pytest.raises(AgentFailed, match="exit code 3: no luck"):
        await run("echo no luck >&2; exit 3", tmp_path)
    with pytest.raises(AgentFailed, match="exit code 137"):
        await run("kill -KILL $$", tmp_path)


async def test_a_command_that_does_not_exist_is_told(tmp_path: Path):
    with pytest.raises(UsageError, match="'no-such-agent' is no program"):
        await run_agent_process(["no-such-agent"], {"PATH": os.environ["PATH"]}, tmp_path, tmp_path)


ENDLESS = """
import agentenv as ae

class Endless(ae.AgentEnv):
    tasks = [{"x": 1}]

    def command(self):
        return ["sh", "-c", "(%s) ; echo $PWD > %s; sleep 1000"]
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
async def test_an_evaluation_that_is_ended_leaves_no_process_and_no_folder(tmp_path: Path, number):
    pid, place = tmp_path / "pid", tmp_path / "place"
    script = (DAEMON % pid).strip(" &") + " &"
    (tmp_path / "endless.py").write_text(textwrap.dedent(ENDLESS) % (script.replace('"', '\\"'), place))
    command = [sys.executable, "-m", "agentenv", "eval", "endless.py", "-m", "mock"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    evaluation = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, **quiet)
    try:
        await until(lambda: all(file.exists() and file.read_text().strip() for file in (pid, place)))

        evaluation.send_signal(number)
        await asyncio.wait_for(evaluation.wait(), 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            evaluation.kill()

    await until(lambda: gone(pid) and not Path(place.read_text().strip()).parent.exists())


class Sleeper(ae.AgentEnv):
    """Leaves a process in a session of its own, and is killed itself in two of three tasks."""

    def command(self, number, folder):
        pid = f"{folder}/{number}"
        ends = ("sleep 1000", "kill -KILL $$", "true")[number % 3]
        return ["sh", "-c", DAEMON % pid + f"while [ ! -s {pid} ]; do sleep 0.01; done; {ends}"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.exhaustive)])
async def test_nothing_is_left_running_after_episodes_with_kills(tmp_path: Path, count: int):
    playing = runner("hi", episode_timeout_s=5.0, concurrency=20)
    tasks = [{"number": number, "folder": str(tmp_path)} for number in range(count)]

    groups = await groups_of(playing, spec_of(Sleeper, tasks))

    assert len(groups) == count
    assert [number for number in range(count) if not gone(tmp_path / str(number))] == []
    assert playing.ledger.balanced
