"""Secrets of the command line stay where they were typed: not in errors, files, logs or lists of processes."""

from __future__ import annotations

import os
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
    "words",
    [
        ("eval", "CALC", "-m", f"http://me:{SECRET}@127.0.0.1:1/v1"),
        ("eval", "CALC", "-m", "none/such", "-o", f"engine.api_key={SECRET}"),
        ("eval", "CALC", "-m", "openai:x", "-o", f'engine.headers={{"X-Key": "a {SECRET}"}}'),
        ("eval", "CALC", f"--set=engine.headers.X-Key=a {SECRET}", "-m", "none/such"),
        ("eval", "CALC", "-m", "none/such", "-o", f"engine.base_url=https://a/v1?key={SECRET}"),
        ("doctor", "-m", f"https://{SECRET}@127.0.0.1:1/v1"),
    ],
)
def test_errors_do_not_repeat_secrets_of_the_command_line(words, command):
    told = command(*("agentenv/Calculator-v0" if word == "CALC" else word for word in words))

    assert told.code
    assert "error" in told.err
    assert SECRET not in told.out + told.err


@pytest.mark.parametrize("model", ["http://me:{}@127.0.0.1:1/v1", "https://{}@127.0.0.1:1/v1"])
def test_a_password_in_an_address_is_refused_because_records_name_the_address(model, command, tmp_path):
    told = command("eval", "agentenv/Calculator-v0", "-m", model.format(SECRET))

    assert told.code == 2
    assert "must hold no name and no password" in told.err
    assert not list(tmp_path.iterdir())


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
def test_records_have_no_key_in_the_query_of_an_address_or_inside_of_options(key):
    options = {
        "base_url": f"https://host/v1?api-version=2024-10-21{key}",
        "api_key": SECRET,
        "provider_options": {"headers": {"X": SECRET}, "region": "a?b"},
    }
    config = EvalConfig(envs=("agentenv/Calculator-v0",), engine=options)

    recorded = config.record()["engine"]

    assert recorded == {
        "base_url": "https://host/v1?api-version=2024-10-21",
        "provider_options": {"region": "a?b"},
    }


def test_a_training_records_no_key(tmp_path):
    config = GRPOConfig(model="m", max_steps=1)
    plan = TrainPlan(
        path=tmp_path,
        envs={"agentenv/Calculator-v0": 1.0},
        config=config,
        limits=RunLimits(),
        runner=RunnerOptions(),
        env={},
        engine={"api_key": SECRET, "retry_s": 3.0},
        demos="none",
        checkpoint=None,
    )

    assert plan.record()["engine"] == {"retry_s": 3.0}
