"""Workers that are processes: the same episodes, whatever dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentenv.cli import main
from agentenv.cli.progress import EvalProgress
from agentenv.core import StopReason, UsageError
from agentenv.envs.spec import EnvSpec
from agentenv.runs import EvalConfig, Evaluation, evaluate, find_run, rollout
from agentenv.runs.view.data import run_data
from agentenv.workers.handshake import Handshake
from agentenv.workers.local import LocalWorker
from agentenv.workers.worker import WorkerLost, mark_as_worker
from helpers.deadly import Deadly
from helpers.hanging import BLOCKS
from helpers.talking_server import talking_servers
from helpers.waiting import PATIENCE_S, wait_until
from helpers.worker_runs import DEADLY, recipe_of, truth

MAIN = "agentenv.workers.local_main"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def episodes(*, split: str = "train", directory: str = "", num_tasks: int = 20, workers: int = 0):
    """Play tasks and return the episodes; without a directory, no task kills anything."""
    groups = rollout(
        DEADLY,
        "random",
        num_tasks=num_tasks,
        group_size=2,
        split=split,
        env={"directory": directory},
        limits={"max_turns": 3},
        workers=workers,
    )
    return [episode for group in groups for episode in group]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_two_processes_play_and_write_the_episodes_of_one(tmp_path: Path):
    settings: dict[str, Any] = {"num_tasks": 10, "group_size": 2, "limits": {"max_turns": 3}}

    evaluate(DEADLY, "random", runs_dir="one", **settings)
    evaluate(DEADLY, "random", runs_dir="two", workers=2, **settings)

    one, two = find_run("last", "one"), find_run("last", "two")
    assert truth(two) == truth(one)
    assert len(two) == 20
    assert two.vocabulary() == one.vocabulary()
    assert [row["worker"] for row in two.workers()] == ["driver", "w1", "w2"]
    assert len({row["pid"] for row in two.workers()}) == 3
    assert run_data(two, vocabulary={})["workers"] == two.workers()
    assert one.workers() == []
    assert {row.key: row.answer for row in two.summaries} == {row.key: row.answer for row in one.summaries}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_records_how_its_servers_do(tmp_path: Path, workers: int):
    with talking_servers(2, tmp_path / "model") as servers:
        urls = ",".join(f"{server.url}/v1" for server in servers)
        evaluate(DEADLY, urls, num_tasks=10, workers=workers, runs_dir="served", limits={"max_turns": 3})

    run = find_run("last", "served")
    rows = run.servers()
    assert sorted(row["server"] for row in rows) == sorted(server.url[7:] for server in servers)
    assert all(1 <= row["processes"] <= max(1, workers) for row in rows)  # a worker tells of those it needed
    assert all(row["used"] for row in rows)
    assert {(row["failures"], row["problem"], row["version"], row["in_flight"]) for row in rows} == {
        (0, "", 0, 0)
    }
    assert run_data(run, vocabulary={})["servers"] == rows
    assert all("servers" not in row for row in run.workers())


def test_the_line_of_progress_says_how_many_servers_are_used(tmp_path: Path):
    with talking_servers(2, tmp_path / "model") as servers:
        urls = ",".join(f"{server.url}/v1" for server in servers)
        evaluation = Evaluation(EvalConfig.of(envs=(DEADLY,), model=urls, num_tasks=2))
        with EvalProgress() as progress:
            progress.begin(evaluation, "a-run")
            line = progress.line()

    assert line.endswith("2/2 servers")


@pytest.mark.parametrize("where", [[], ["--ray", "127.0.0.1:9"]])
def test_a_crew_that_cannot_start_is_refused_before_a_run_is_announced(
    where: list[str], capsys: pytest.CaptureFixture[str]
):
    if where:
        pytest.importorskip("ray", reason="ray is not installed (pip install 'agentenv-rl[ray]')")
    text = f"\nimport sys\nif {MAIN!r} in sys.orig_argv:\n    raise ValueError('no table')\n"
    Path("broken.py").write_text(Path(DEADLY).read_text().replace("helpers/", "broken/") + text)

    with pytest.raises(SystemExit):
        main(["eval", "broken.py", "-m", "random", "-n", "2", "--workers", "1", *where])

    said = capsys.readouterr()
    assert said.out == ""
    assert ("no Ray cluster answers" if where else "no table") in said.err
    assert not list(Path("runs").iterdir())


def test_a_worker_starts_no_workers(monkeypatch: pytest.MonkeyPatch):
    import threading

    monkeypatch.setattr("agentenv.workers.worker._is_worker", threading.Event())
    mark_as_worker()

    with pytest.raises(UsageError, match="__name__ == '__main__'"):
        evaluate(DEADLY, "random", num_tasks=2, workers=1)


@pytest.mark.parametrize(
    ("model", "where", "told"),
    [
        ("smollm2", {"workers": 1}, "start a server"),
        ("hf:./model", {"workers": 1}, "start a server"),
        ("vllm:./model", {"workers": 1}, "start a server"),
        ("random", {"ray": "auto"}, "say how many"),
    ],
)
def test_a_model_in_the_drivers_process_and_a_cluster_without_workers_are_refused(model, where, told):
    with pytest.raises(UsageError, match=told):
        evaluate(DEADLY, model, num_tasks=2, **where)


@pytest.mark.slow
def test_killed_workers_change_nothing_and_a_poison_episode_ends_alone(tmp_path: Path):
    whole = truth(episodes(split="poison", num_tasks=40))

    played = episodes(split="poison", num_tasks=40, directory=str(tmp_path), workers=3)

    bad = [one for one in played if one.task["x"] == 3]
    good = truth(one for one in played if one.task["x"] != 3)
    assert [(one.stop_reason, one.error and one.error.boundary) for one in bad] == [
        (StopReason.ABORTED, "worker")
    ] * 2
    assert "SIGKILL" in str(bad[0].error)
    assert len(good) == 78
    assert good == {key: whole[key] for key in good}


RUDE = """
import asyncio, os, signal
import agentenv as ae

class Rude(ae.ToolEnv):
    tasks = [{"x": x} for x in range(3)]

    async def start(self, x):
        if x == 1:
            WHAT
        return "Say anything."

    def reward(self, answer):
        return 1.0
"""


@pytest.mark.parametrize(
    "what",
    [
        "[task.cancel() for task in asyncio.all_tasks()]",
        "asyncio.get_running_loop().stop()",
        "os.kill(os.getpid(), signal.SIGINT)",
    ],
)
def test_code_that_ends_the_loop_of_its_worker_is_named_and_ends_alone(
    what: str, tmp_path: Path, capfd, request
):
    # A job in the background of a script has Ctrl-C ignored, and so would its workers.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    file = tmp_path / "rude.py"
    file.write_text(RUDE.replace("WHAT", what))

    (rude,) = [
        one
        for group in rollout(str(file), "mock", num_tasks=3, workers=2)
        for one in group
        if one.task["x"] == 1 or one.stop_reason.failed
    ]

    assert rude.error is not None
    assert "code that it played" in rude.error.message
    assert "Traceback" not in capfd.readouterr().err


async def test_what_is_asked_when_a_worker_is_found_dead_fails_as_well():
    specs = [EnvSpec.of("helpers/Deadly-v0", Deadly)]
    worker = LocalWorker(recipe_of(specs).to_json(), "w1", Handshake(specs))
    await worker.start()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)

    asyncio.get_running_loop().call_soon(worker.kill, "was killed by a test")

    with pytest.raises(WorkerLost, match="was killed by a test"):
        await worker.stats()
    with pytest.raises(WorkerLost, match="w1 has ended"):
        async with asyncio.timeout(PATIENCE_S):
            await worker.stats()
    await worker.close()


@pytest.mark.slow
def test_a_killed_driver_takes_its_workers_along_and_its_run_is_resumed(tmp_path: Path):
    words = [sys.executable, "-m", "agentenv", "eval", "--runs-dir", "cut", "--json"]
    task = [DEADLY, "-m", "random", "-n", "250", "-k", "2", "--workers", "2", "-o", "max_turns=3"]

    def lines() -> int:
        return sum(file.read_bytes().count(b"\n") for file in tmp_path.glob("cut/*/trajectories.jsonl"))

    def workers(driver: int) -> list[int]:
        words = ["ps", "-e", "-o", "pid=,ppid=,args="]
        rows = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        found = [row.split(None, 2) for row in rows.splitlines()]
        return [int(pid) for pid, parent, args in found if int(parent) == driver and MAIN in args]

    driver = subprocess.Popen([*words, *task], stdout=subprocess.DEVNULL)
    wait_until(lambda: lines() > 50, seconds=120)
    ours = workers(driver.pid)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    kept = len(find_run("last", "cut"))

    wait_until(lambda: not any(map(alive, ours)), seconds=60)
    subprocess.run([*words, "--resume", "last", "--workers", "3"], check=True, capture_output=True)

    assert len(ours) == 2
    assert 50 < kept < 500
    assert truth(find_run("last", "cut")) == truth(
        one
        for group in rollout(DEADLY, "random", num_tasks=250, group_size=2, limits={"max_turns": 3})
        for one in group
    )


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "failed"), [("Blocks", {3: "worker"}), ("Stops", {})])
def test_a_blocked_or_stopped_worker_is_replaced_and_the_run_ends(entry, failed, monkeypatch):
    monkeypatch.setattr("agentenv.workers.silence.GRACE_S", 1.0)
    Path("blocks.py").write_text(BLOCKS)
    limits = {"tool_timeout_s": 2, "env_timeout_s": 2, "reward_timeout_s": 2, "max_turns": 1}

    result = evaluate(
        f"blocks.py:blocks/{entry}-v0", "random", num_tasks=20, workers=2, limits=limits, runs_dir="runs"
    )

    assert result.run is not None
    records = {episode.task["x"]: episode for episode in result.run}
    assert len(records) == 20
    assert {x: one.error.boundary for x, one in records.items() if one.error} == failed
    assert all("answered nothing for 3 s" in str(one.error) for one in records.values() if one.error)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_worker_ends_with_its_driver_which_an_interrupt_ends(number):
    Path("blocks.py").write_text(BLOCKS)
    # With less patience than the minute that a worker has to close.
    code = "from agentenv.workers import local; local.CLOSE_S = 5.0; from agentenv.cli import main; main()"
    words = [sys.executable, "-c", code, "eval", "blocks.py:blocks/Stops-v0", "-m", "random"]
    # Tests that run in the background ignore the signal, and so would the driver.
    words = ["env", "--default-signal=INT", *words, "--workers", "2", "--json"]
    driver = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    wait_until(lambda: Path("stopped").exists() and Path("stopped").read_text(), seconds=120)
    worker = int(Path("stopped").read_text())

    driver.send_signal(number)

    assert driver.wait(timeout=180) == (130 if number == signal.SIGINT else -number)
    wait_until(lambda: not alive(worker), seconds=60)


GAME = """
import agentenv as ae

class Game(ae.ToolEnv):
    def start(self, n: int) -> str:
        return "Go."

    @ae.tool(isolated=True)
    def double(x: int) -> int:
        return 2 * x

    def reward(self, answer: str) -> float:
        return 1.0

ae.register("names/Game-v0", Game, tasks=[{"n": n} for n in range(4)])
"""


def test_files_beside_an_environment_may_have_the_names_of_standard_modules(tmp_path: Path):
    for name in ("random", "types", "queue", "socket", "json"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is a file of the user')\n")
    (tmp_path / "game.py").write_text(GAME)
    words = ["-c", "from agentenv.cli import main; main()", "eval", "game.py", "-m", "mock", "--workers", "2"]

    done = subprocess.run([sys.executable, "-P", *words], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "this is a file of the user" not in done.stdout + done.stderr


def test_a_finished_run_and_one_that_names_other_workers_need_no_cluster(tmp_path: Path, capsys):
    def resumed(*more: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["eval", "--resume", str(directory), "--trust", *more])
        return int(ended.value.code or 0)

    evaluate(DEADLY, "random", num_tasks=2, workers=1, runs_dir=tmp_path, limits={"max_turns": 3})
    (directory,) = (path for path in tmp_path.iterdir() if path.is_dir())
    info = json.loads((directory / "run.json").read_text())
    info["config"]["ray"] = "127.0.0.1:1"  # a cluster that has gone
    (directory / "run.json").write_text(json.dumps(info))

    assert resumed("--workers", "1") == 0
    for name in ("trajectories.jsonl", "index.jsonl"):
        (directory / name).write_text("".join((directory / name).read_text().splitlines(keepends=True)[:1]))
    assert resumed("--workers", "1") == 0

    assert len(find_run(str(directory))) == 2
    assert "127.0.0.1:1" not in capsys.readouterr().err
