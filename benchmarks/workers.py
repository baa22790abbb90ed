"""Measure what workers bring and what they cost: speed-up, the driver's processor time, memory, delays.

    python benchmarks/workers.py [--quick] [--ray] [--peers PYTHON] [--json PATH]

Every row plays real episodes with scripted completions. Processor times of the driver are those of its
process alone, beyond the start of the run. The speed-up is a wall-clock time and needs an idle machine. With
`--ray` the rows of local processes are repeated on a Ray cluster that the script starts on this machine.
PYTHON is an interpreter with verifiers, whose two env workers then play episodes of the same length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import subprocess
import tempfile
import time
from pathlib import Path

from agentenv.envs import ToolEnv
from agentenv.runs import EvalConfig, Evaluation, RunWriter
from agentenv.tools import tool

LOOK = '<tool_call>{"name": "look", "arguments": {"page": 1}}</tool_call>'
TURNS = 4


class Light(ToolEnv):
    """Answers with a short text."""

    tasks = staticmethod(lambda: ({"x": x} for x in range(9_999)))

    def start(self, x: int) -> str:
        """Ask."""
        return f"Read page {x} and answer."

    @tool
    def look(self, page: int) -> str:
        """Look."""
        return "the quick brown fox " * 5

    def reward(self, answer: str) -> float:
        """Be content."""
        return 1.0


class Spin(Light):
    """Computes for 20 ms in each tool call."""

    @tool
    def look(self, page: int) -> str:
        """Look."""
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return "the quick brown fox " * 5


class Sleep(Light):
    """Sleeps in its only tool call until a file exists."""

    def __init__(self, awake: str) -> None:
        super().__init__()
        self.awake = awake

    @tool
    async def look(self, page: int) -> str:
        """Look."""
        while not os.path.exists(self.awake):  # noqa: ASYNC110, ASYNC240, PTH110 - another process makes it
            await asyncio.sleep(20.0)
        return "awake"


class Run:
    """One evaluation whose driver is measured."""

    def __init__(self, env, tasks, *, turns=TURNS, workers=0, ray="", concurrency=64, text="", **env_kwargs):
        self.home = tempfile.TemporaryDirectory()
        script = Path(self.home.name, "script.json")
        script.write_text(json.dumps([*[LOOK] * (turns - 1), text or "That is all."]))
        config = EvalConfig.of(
            envs=(f"{__file__}:{env}",),
            model=f"scripted:{script}",
            num_tasks=tasks,
            workers=workers,
            ray=ray,
            runner={"concurrency": concurrency},
            limits={"max_tokens_per_turn": 65_536, "tool_timeout_s": 3600.0, "env_timeout_s": 3600.0},
            env=env_kwargs,
        )
        self.evaluation = Evaluation(config)
        self.config, self.turns = config, turns
        self.cpu = self.wall = 0.0

    async def play(self):
        """Play it in a run directory, and keep the driver's times and the rows about the workers."""
        with RunWriter.create("bench", runs_dir=self.home.name) as writer:
            self.evaluation.keep_in(writer)
            cpu, wall = time.process_time(), time.perf_counter()
            result = await self.evaluation.play()
            self.cpu, self.wall = time.process_time() - cpu, time.perf_counter() - wall
        assert not any(summary.error for summary in result.summaries), result.report
        self.rows = writer_rows(writer)
        self.home.cleanup()
        return self


def writer_rows(writer):
    path = writer.path / "workers.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def driver_ms(env, few, many, **options):
    """Return the driver's CPU milliseconds for each further episode."""
    small = asyncio.run(Run(env, few, **options).play())
    large = asyncio.run(Run(env, many, **options).play())
    return 1000 * (large.cpu - small.cpu) / (many - few)


def speed_up(quick):
    tasks = 40 if quick else 200
    walls = {workers: asyncio.run(Run("Spin", tasks, workers=workers).play()).wall for workers in (0, 1, 2)}
    starts = {workers: asyncio.run(Run("Spin", 2, workers=workers).play()).wall for workers in (0, 1, 2)}
    for workers, wall in walls.items():
        own = wall - starts[workers]
        yield {"what": f"computing environment, {workers} workers", "wall_s": round(own, 2)}
    ratio = (walls[1] - starts[1]) / (walls[2] - starts[2])
    yield {"what": "speed-up of 2 workers over 1", "ratio": round(ratio, 2)}


def overhead(quick, rays):
    few, many = (50, 300) if quick else (200, 2200)
    yield {"what": "one process, all its work, CPU ms a turn", "ms": turn_ms("Light", few, many, workers=0)}
    for ray in rays:
        name = "Ray" if ray else "local processes"
        ms = turn_ms("Light", few, many, workers=2, ray=ray)
        yield {"what": f"{name}, driver, CPU ms a turn", "ms": ms}


def peers(python, quick):
    """Measure the driver of verifiers, which sends episodes to its env workers and takes the outputs back."""
    few, many = (20, 120) if quick else (100, 1100)
    spent = {count: verifiers_ms(python, count) * count for count in (few, many)}
    ms = (spent[many] - spent[few]) / (many - few)
    yield {"what": "verifiers, 2 env workers, driver, CPU ms a turn", "ms": round(ms, 3)}


def verifiers_ms(python, count):
    """Return the CPU milliseconds of the driver for a turn, its start among them."""
    script = Path(__file__).with_name("runner_peers.py")
    shape = {"turns": TURNS - 1, "at-once": 64, "count": count, "text": "the quick brown fox " * 5}
    options = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    command = [python, str(script), "verifiers_workers", *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return json.loads(done.stdout.splitlines()[-1])["ms"]


def turn_ms(env, few, many, **options):
    return round(driver_ms(env, few, many, **options) / TURNS, 3)


def long_episodes(quick):
    few, many = (10, 60) if quick else (50, 450)
    for workers in (0, 2):
        ms = driver_ms("Light", few, many, turns=1, workers=workers, text="x" * 4000)
        where = f"driver of {workers} workers" if workers else "one process, all its work"
        yield {"what": f"4k-token episode, {where}", "ms": round(ms, 2), "per_s": round(1000 / ms)}


def sleeping(live, rays):
    for ray in rays:
        row = asyncio.run(asleep(live, ray))
        yield {"what": f"{live} live sleeping episodes on 2 workers{' of Ray' if ray else ''}", **row}


async def asleep(live, ray):
    with tempfile.TemporaryDirectory() as directory:
        awake = Path(directory, "awake")
        run = Run("Sleep", live, turns=2, workers=2, ray=ray, concurrency=live, awake=str(awake))
        playing = asyncio.create_task(run.play())
        while not playing.done():
            await asyncio.sleep(1.0)
            crew = run.evaluation.crew
            workers = await crew.stats() if crew is not None else []
            if sum(row.get("waits", {}).get("env", {}).get("episodes", 0) for row in workers) >= live:
                break
        driver = resident_mb()
        cpu = time.process_time()
        await asyncio.to_thread(awake.touch)
        await playing
        ended = run.rows[-3:]
    return {
        "driver_mb": round(driver),
        "workers_mb": [round(row["rss_mb"]) for row in workers],
        "in_all_gib": round((driver + sum(row["rss_mb"] for row in workers)) / 1074, 2),
        "lag_p99_ms": {row["worker"]: round(1000 * row.get("lag_p99_s", -1)) for row in ended},
        "driver_cpu_ms_an_episode": round(1000 * run.cpu / live, 3),
        "of_it_ending": round(1000 * (time.process_time() - cpu) / live, 3),
    }


def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def start_ray():
    import ray

    os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0")
    memory = 200 * 2**20
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=memory, logging_level=logging.ERROR)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--peers", metavar="PYTHON")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rays = ["", "auto"] if given.ray else [""]
    if given.ray:
        start_ray()
    rows = []
    counts = [500] if given.quick else [1000, 9999]
    for measured in (
        speed_up(given.quick),
        overhead(given.quick, rays),
        *([peers(given.peers, given.quick)] if given.peers else []),
        long_episodes(given.quick),
        *(sleeping(count, rays) for count in counts),
    ):
        for row in measured:
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
