"""Workers, servers and driver are killed, stopped, slowed and replaced at random while new weights are pushed.

Nothing is lost, nothing is doubled, and each token was sampled from the weights that its record names.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from agentenv.core.trajectory import StopReason, Trajectory
from agentenv.engine.vllm import connect
from agentenv.engine.vllm import pool as pools
from agentenv.render import byte_tokenizer
from agentenv.runs import find_run
from agentenv.training.loop import save_tokenizer
from helpers.chaotic import ENV, said

SERVERS, WORKERS, AT_ONCE = 4, 3, 24
CHAOS_S = 600.0
"""Seconds after which nothing happens any more, so that a busy machine finishes the run, too."""
TOKENIZER = byte_tokenizer()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Chaos:
    """The processes of a run, and what happens to them.

    Args:
        place: directory of the run.
        episodes: number of episodes.
        seed: decides what happens.
    """

    def __init__(self, place: Path, episodes: int, seed: int) -> None:
        self.place, self.episodes = place, episodes
        self.random = Random(seed)
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        self.others: list[subprocess.Popen[bytes]] = []
        """Servers that are on the list no more."""
        self.hung: set[int] = set()
        """Workers that nothing wakes again, or the waits of their episodes would have been too long."""
        self.happened: Counter[str] = Counter()
        self.begun = self.spared = 0
        """Number of records when the driver began, and of those before which it is left alone, as a run that
        never begins shows nothing."""
        (place / "tokenizer").mkdir()
        save_tokenizer(TOKENIZER, place / "tokenizer")
        for _ in range(SERVERS):
            self.begin_server(free_port())
        self.driver = self.begin_driver()

    def begin_server(self, port: int) -> None:
        words = [sys.executable, "-m", "helpers.chaotic", str(port)]
        self.servers[port] = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        lines = "".join(f"http://127.0.0.1:{port}/v1\n" for port in self.servers)
        (self.place / "servers").write_text(lines)

    def kept(self, what: bytes = b"\n") -> int:
        """Return the number of records so far, or of those that contain this."""
        return sum(file.read_bytes().count(what) for file in self.place.glob("runs/*/trajectories.jsonl"))

    def begin_driver(self) -> subprocess.Popen[bytes]:
        self.begun = self.kept()
        self.spared = self.begun + min(self.episodes // 4, 300)
        runs = self.place / "runs"
        begun = any(runs.glob("*/trajectories.jsonl"))
        what = ["--resume", "last"] if begun else [ENV, "-m", f"servers:{self.place}/servers", "-k", "1"]
        settings = {
            "concurrency": AT_ONCE,
            "max_turns": 4,
            "env_timeout_s": 15,  # a wait of 8 s, and a worker that is stopped meanwhile
            "tool_timeout_s": 10,
            "reward_timeout_s": 10,
            "engine.hang_s": 4,
            "engine.retry_s": 300,
            "engine.start_timeout_s": 60,
        }
        options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        if not begun:
            what += ["--tokenizer", f"{self.place}/tokenizer", "-n", str(self.episodes), *options]
        words = [sys.executable, "-m", "agentenv", "eval", *what, "--workers", str(WORKERS)]
        with (self.place / "log").open("ab") as log:
            return subprocess.Popen([*words, "--runs-dir", str(runs)], stdout=log, stderr=log)

    def workers(self) -> list[int]:
        words = ["ps", "-e", "-o", "pid=,ppid=,args="]
        rows = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
        found = [row.split(None, 2) for row in rows]
        mine = [
            int(pid) for pid, parent, args in found if int(parent) == self.driver.pid and "local_main" in args
        ]
        return [pid for pid in mine if pid not in self.hung]

    async def stop(self, pid: int, seconds: float) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    async def happen(self) -> None:
        """Let one thing happen."""
        draw = self.random
        port, workers = draw.choice(list(self.servers)), self.workers()
        server = self.servers[port]
        kinds = {"worker killed": 3, "worker stopped": 2, "worker hung": 1, "server restarted": 2}
        kinds |= {"server replaced": 2, "server stopped": 2, "server slow or quick": 2}
        if self.kept() >= self.spared:
            kinds |= {"driver killed": 2, "driver ended": 1, "driver stopped": 1}
        kind = draw.choices(list(kinds), list(kinds.values()))[0]
        if kind.startswith("worker") and not workers:
            return
        if kind == "worker hung" and self.kept() == self.begun:  # one that never starts is waited for
            return
        self.happened[kind] += 1
        if kind == "worker killed":
            os.kill(draw.choice(workers), signal.SIGKILL)
        elif kind == "worker stopped":
            await self.stop(draw.choice(workers), draw.uniform(0.2, 3))
        elif kind == "worker hung":
            self.hung.add(pid := draw.choice(workers))
            os.kill(pid, signal.SIGSTOP)
        elif kind == "driver stopped":
            await self.stop(self.driver.pid, draw.uniform(0.2, 3))
        elif kind.startswith("driver"):
            self.driver.send_signal(signal.SIGKILL if kind == "driver killed" else signal.SIGTERM)
            await asyncio.to_thread(self.driver.wait)
            self.driver = self.begin_driver()
        elif kind == "server restarted":
            server.kill()
            server.wait()
            self.begin_server(port)
        elif kind == "server replaced":
            self.others.append(self.servers.pop(port))
            self.begin_server(free_port())
        elif kind == "server stopped":
            await self.stop(server.pid, draw.uniform(0.2, 7))
        else:
            server.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        for process in (self.driver, *self.servers.values(), *self.others):
            process.kill()
            process.wait()


async def push(chaos: Chaos) -> None:
    """Push new weights again and again, as a training does."""
    address = f"servers:{chaos.place}/servers"
    options = {"tokenizer": "x", "hang_s": 4.0, "retry_s": 60.0, "start_timeout_s": 300.0}
    engine, _ = await asyncio.to_thread(connect, address, **options)
    try:
        await engine.claim("chaos-1")
        for version in range(1, 10_000):
            await engine.load_weights(f"/w/{version}", version=version)
            chaos.happened["push"] += 1
            await asyncio.sleep(chaos.random.uniform(0.5, 4))
    finally:
        await engine.close()


def check(episode: Trajectory) -> set[int]:
    """Check what each completion says, and return the versions that answered."""
    assert episode.stop_reason is StopReason.ENV_TERMINATED, (episode.stop_reason, episode.error)
    assert (len(episode.turns), episode.reward) == (4, 4.0)
    before: list[int] = []
    versions: set[int] = set()
    for span in episode.sequences[0].spans:
        if span.source == "model":
            version = span.weights_version
            weights = f"/w/{version}" if version else "start"
            assert TOKENIZER.decode(span.token_ids[:-1]) == said(weights, before)
            versions.add(version)
        before += span.token_ids
    return versions


@pytest.mark.parametrize(
    ("episodes", "pause_s"),
    [
        pytest.param(100, 2.0, marks=pytest.mark.slow),
        pytest.param(5500, 3.0, marks=pytest.mark.exhaustive),
    ],
)
async def test_nothing_is_lost_or_doubled_and_all_tokens_are_of_the_right_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, episodes: int, pause_s: float
):
    monkeypatch.setattr(pools, "CHECK_EVERY_S", 0.5)
    monkeypatch.setattr(pools, "LIST_EVERY_S", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    chaos = Chaos(tmp_path, episodes, seed=11)
    pushing = asyncio.create_task(push(chaos))
    until = monotonic() + CHAOS_S
    try:
        while (ended := chaos.driver.poll()) != 0:
            await asyncio.sleep(chaos.random.uniform(0, pause_s))
            assert not pushing.done(), pushing.exception()
            if ended is not None:  # it gives up if three workers in a row are killed while they start
                chaos.happened["driver gave up"] += 1
                chaos.driver = chaos.begin_driver()
            elif chaos.kept() and monotonic() < until:
                await chaos.happen()
    finally:
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
        chaos.end()

    run = find_run("last", tmp_path / "runs")
    assert len(run) == episodes, (tmp_path / "log").read_text()[-3000:]
    # A resumed run plays again what was aborted, and nothing else.
    assert chaos.kept() - episodes <= chaos.kept(b'"stop_reason":"aborted"')
    # An episode that loses three workers, the last one alone with it, is given up, whoever killed them.
    given_up = [episode for episode in run if episode.error and "died 3 times" in episode.error.message]
    played = [episode for episode in run if episode.stop_reason is not StopReason.ABORTED]
    assert len(played) + len(given_up) == episodes
    assert len(given_up) <= episodes // 100
    versions = Counter(version for episode in played for version in check(episode))
    assert len(versions) > 1
    print(dict(chaos.happened), f"{len(versions)} versions, {len(given_up)} given up")
