"""Secrets of the command line stay where they were typed: not in errors, files, logs or lists of processes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import psutil
import pytest

from agentenv.core.limits import RunLimits
from agentenv.runner import RunnerOptions
from agentenv.runs.eval_config import EvalConfig
from agentenv.training import GRPOConfig
from agentenv.training.request import TrainPlan
from helpers.chat_server import chat_server
from helpers.waiting import wait_until

SECRET = "hunter2secret"

WAITING = """
import asyncio, pathlib

import agentenv as ae

class Wait(ae.ToolEnv):
    async def start(self, n: int) -> str:
        pathlib.Path(f"started-{n}").touch()
        while not pathlib.Path("go").exists():
            await asyncio.sleep(0)
        return f"What is {n} + 1?"

    def reward(self, answer: str) -> float:
        return 1.0

ae.register("secrets/Wait-v0", Wait, tasks=[{"n": n} for n in range(4)])
"""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"eval CALC -m http://me:{SECRET}@127.0.0.1:1/v1", "must hold no name and no password"),
        (f"eval CALC -m https://{SECRET}@127.0.0.1:1/v1", "must hold no name and no password"),
        (f"eval CALC -m none/such -o engine.api_key={SECRET}", ""),
        (f"""eval CALC -m openai:x -o 'engine.headers={{"X-Key": "a {SECRET}"}}'""", ""),
        (f"eval CALC '--set=engine.headers.X-Key=a {SECRET}' -m none/such", ""),
        (f"eval CALC -m none/such -o 'engine.base_url=https://a/v1?key={SECRET}'", ""),
        (f"doctor -m https://{SECRET}@127.0.0.1:1/v1", ""),
    ],
)
def test_errors_do_not_repeat_secrets_of_the_command_line(line, told, command, tmp_path):
    said = command(*shlex.split(line.replace("CALC", "agentenv/Calculator-v0")))

    assert said.code
    assert "error" in said.err
    assert told in said.err  # a record names the address of a model
    assert not told or not list(tmp_path.iterdir())
    assert SECRET not in said.out + said.err


def test_a_run_leaves_no_secret_in_files_output_or_the_list_of_processes(tmp_path):
    (tmp_path / "wait.py").write_text(WAITING)
    with chat_server() as address:
        words = ["eval", "wait.py", "-m", "openai:some", "-n", "4", "--workers", "2"]
        words += ["-o", f"engine.base_url={address}", "-o", f'engine.headers={{"X-Key" = "{SECRET}"}}']
        with subprocess.Popen(
            [sys.executable, "-m", "agentenv", *words],
            cwd=tmp_path,
            env={**os.environ, "OPENAI_API_KEY": SECRET},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as run:
            try:
                wait_until(lambda: run.poll() is not None or len(list(tmp_path.glob("started-*"))) == 4)
                lines = [process.cmdline() for process in psutil.Process(run.pid).children(recursive=True)]
                (tmp_path / "go").touch()
                output, _ = run.communicate(timeout=60)
            finally:
                run.kill()

    assert run.returncode == 0, output
    assert len(lines) >= 2
    assert SECRET not in str(lines)
    assert SECRET not in output
    written = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert written
    assert not [file for file in written if SECRET.encode() in file.read_bytes()]


@pytest.mark.parametrize("key", [f"&key={SECRET}", f"#token={SECRET}"])
def test_records_have_no_key_in_the_query_of_an_address_or_inside_of_options(key, tmp_path):
    address = "https://host/v1?api-version=2024-10-21"
    options = {
        "base_url": address + key,
        "api_key": SECRET,
        "provider_options": {"headers": {"X": SECRET}, "region": "a?b"},
    }
    env = "agentenv/Calculator-v0"
    evaluation = EvalConfig(envs=(env,), engine=options)
    training = TrainPlan(
        path=tmp_path, envs={env: 1.0}, config=GRPOConfig(model="m", max_steps=1), limits=RunLimits(),
        runner=RunnerOptions(), env={}, engine=options, demos="none", checkpoint=None,
    )  # fmt: skip

    recorded = {"base_url": address, "provider_options": {"region": "a?b"}}
    assert evaluation.record()["engine"] == training.record()["engine"] == recorded
