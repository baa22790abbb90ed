"""The same 400 episodes in one process, in worker processes and on a Ray cluster of three nodes, whatever dies."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentenv.core import UsageError
from agentenv.envs import spec
from agentenv.runs import find_run, rollout
from agentenv.workers import crew_of
from helpers.deadly import WAITING
from helpers.hanging import BLOCKS
from helpers.talking_server import talking_servers
from helpers.waiting import wait_until
from helpers.worker_runs import DEADLY, recipe_of, truth

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's own sockets
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]
NODE: dict[str, Any] = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
PATIENCE_S = 120.0
Truth = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def cluster() -> Generator[Any]:
    """Start three nodes on this machine; workers need only three of their seven processors."""
    ray: Any = pytest.importorskip("ray", reason="ray is not installed (pip install 'agentenv-rl[ray]')")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # everything listens on loopback
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, **NODE})
        try:
            for _ in range(2):
                nodes.add_node(num_cpus=2, **NODE)
            ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


@pytest.fixture(params=["processes", "cluster"])
def crew(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the settings of three workers."""
    if request.param == "processes":
        return {"workers": 3}
    return {"workers": 3, "ray": request.getfixturevalue("cluster").address}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def episodes(split: str = "once", num_tasks: int = 200, model: str = "random", **settings: Any) -> Truth:
    groups = rollout(
        DEADLY,
        model,
        num_tasks=num_tasks,
        group_size=2,
        split=split,
        limits={"max_turns": 3, "env_timeout_s": 600.0},
        **settings,
    )
    return truth(episode for group in groups for episode in group)


@pytest.fixture(scope="module")
def whole() -> Truth:
    """Return the 400 episodes of one process in which nothing dies."""
    played = episodes()
    assert len(played) == 400
    return played


def waiting(directory: Path) -> list[int]:
    """Return the processes of all episodes that wait, as soon as each of them was begun; else nothing."""
    marks = [path.name.split("-") for path in directory.glob("waits-*")]
    return [int(pid) for _, _, pid, _ in marks] if len(marks) == 2 * len(WAITING) else []


def test_two_of_three_workers_are_killed(crew: dict[str, Any], tmp_path: Path, whole: Truth):
    played = episodes(env={"directory": str(tmp_path)}, **crew)

    assert sorted(path.name for path in tmp_path.glob("killed-*")) == ["killed-11-0", "killed-5-0"]
    assert played == whole


def test_one_of_two_servers_is_killed(crew: dict[str, Any], tmp_path: Path):
    def play(dies_after: int, **settings: Any) -> tuple[Truth, list[int]]:
        with talking_servers(2, tmp_path / "model") as servers:
            servers[0].dies_after = dies_after
            urls = ",".join(f"{server.url}/v1" for server in servers)
            played = episodes(model=urls, **settings)
            assert (servers[0].died is not None) == bool(dies_after)
            return played, [server.answered for server in servers]

    alone, _ = play(0)
    played, answered = play(100, **crew)

    assert played == alone
    assert len(alone) == 400
    assert 100 <= answered[0] < answered[1]


def test_a_node_is_killed(cluster: Any, tmp_path: Path, whole: Truth):
    gate, killed = tmp_path / "go", []

    def kill() -> None:
        try:
            pids = wait_until(lambda: waiting(tmp_path), seconds=PATIENCE_S)
            parents = {pid: psutil.Process(pid).ppid() for pid in pids}
            nodes = [node for node in cluster.worker_nodes if raylet(node) in parents.values()]
            lost = [pid for pid, parent in parents.items() if parent == raylet(nodes[0])]
            cluster.remove_node(nodes[0], allow_graceful=False)
            killed.append(nodes[0])
            # The actors outlive their node for a moment, in which they must not end their episodes.
            wait_until(lambda: not any(map(alive, lost)), seconds=PATIENCE_S)
        finally:
            gate.touch()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        played = episodes(
            env={"directory": str(tmp_path), "until": str(gate)}, workers=3, ray=cluster.address
        )
    finally:
        killer.join()
        if killed:
            cluster.add_node(num_cpus=2, **NODE)

    assert len(killed) == 1
    assert len(list(tmp_path.glob("waits-*"))) > 2 * len(WAITING), "nothing was played again"
    assert played == whole


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def raylet(node: Any) -> int:
    """Return the process of a node whose children are the node's actors."""
    return node.all_processes["raylet"][0].process.pid


def test_the_driver_is_killed_and_the_run_resumed(cluster: Any, tmp_path: Path, whole: Truth):
    gate = tmp_path / "go"
    words = [sys.executable, "-m", "agentenv", "eval", "--runs-dir", "cut", "--json"]
    where = ["--workers", "3", "--ray", cluster.address]
    options = ["max_turns=3", "env_timeout_s=600", f"env.directory={tmp_path}", f"env.until={gate}"]
    task = [DEADLY, "-m", "random", "-n", "200", "-k", "2", "--split", "once", *where]
    task += [word for option in options for word in ("-o", option)]

    driver = subprocess.Popen([*words, *task], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: waiting(tmp_path), seconds=PATIENCE_S)
        wait_until(lambda: lines(tmp_path) > 50, seconds=PATIENCE_S)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        gate.touch()
    kept = len(find_run("last", "cut"))
    subprocess.run([*words, "--resume", "last", *where], check=True, capture_output=True)

    assert 50 < kept < 400
    assert truth(find_run("last", "cut")) == whole


def lines(directory: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in directory.glob("cut/*/trajectories.jsonl"))


@pytest.mark.exhaustive  # a busy machine makes actors that are well late, too, and they may be killed as well
@pytest.mark.parametrize(("entry", "failed"), [("Blocks", {3}), ("Stops", set[int]())])
def test_a_hung_actor_is_replaced(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry, failed
):
    monkeypatch.setattr("agentenv.workers.silence.GRACE_S", 1.0)
    (tmp_path / "blocks.py").write_text(BLOCKS)
    limits = {"tool_timeout_s": 2, "env_timeout_s": 2, "reward_timeout_s": 2, "max_turns": 1}

    groups = rollout(
        f"blocks.py:blocks/{entry}-v0", "random", num_tasks=20, workers=2, limits=limits, ray=cluster.address
    )

    records = {episode.task["x"]: episode for group in groups for episode in group}
    assert len(records) == 20
    errors = {x: one.error for x, one in records.items() if one.error}
    assert failed <= errors.keys()
    assert {error.boundary for error in errors.values()} <= {"worker"}
    assert all("answered nothing for 3 s" in error.message for error in errors.values())


def test_an_actor_with_other_code_is_refused_with_its_node(cluster: Any, tmp_path: Path):
    (tmp_path / "blocks.py").write_text(BLOCKS)
    shop = spec("blocks.py:blocks/Blocks-v0")
    hired = crew_of(recipe_of([shop]), [shop], workers=1, ray=cluster.address)
    (tmp_path / "blocks.py").write_text(BLOCKS + "# newer\n")

    with pytest.raises(
        UsageError, match=r"worker w1 on \S+ \([\d.:]+\) cannot play .* another \S*/blocks.py"
    ):
        asyncio.run(hired.__aenter__())

    (tmp_path / "blocks.py").write_text("raise RuntimeError('no such driver')")
    with pytest.raises(
        UsageError, match=r"worker w2 on \S+ \([\d.:]+\) cannot open this run: .*no such driver"
    ):
        asyncio.run(hired.__aenter__())
