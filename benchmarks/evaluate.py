"""Measure whole evaluations without a model, including start-up, and reading runs back.

Beside the first evaluation stands what importing the packages alone takes that every evaluation needs.

    python benchmarks/evaluate.py [--quick] [--json PATH] [--peers PYTHON]

Inspect runs the same number of episodes of a similar task with its own mock model, if the interpreter named
with `--peers` has it.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from fresh import Fresh, Spent, fresh_processes

from agentenv.core import StopReason, TokenSequence, TokenSpan, Trajectory, Turn
from agentenv.runs.store import EPISODES, INDEX, Run, RunWriter, index_line

ENV = """
import agentenv as ae

class Adder(ae.ToolEnv):
    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    @ae.tool
    def add(self, a: int, b: int) -> int:
        "Add two numbers."
        return a + b

    def reward(self, answer: str) -> float:
        return float(str(self.want) in answer)

ae.register("bench/Adder-v0", Adder, tasks=[{"x": i, "y": 1} for i in range(500)])
"""
PEER = '''
from inspect_ai import Task, eval, task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

@tool
def add():
    async def execute(a: int, b: int):
        """Add two numbers.

        Args:
            a: first number
            b: second number
        """
        return a + b
    return execute

samples = [Sample(input=f"What is {i} + 1?", target=str(i + 1)) for i in range(COUNT)]
job = Task(dataset=samples, solver=[use_tools(add()), generate()], scorer=includes())
eval(job, model="mockllm/model", display="none")
'''


LIBRARIES = "import asyncio, gymnasium, jinja2.sandbox, pydantic, tokenizers, typer"


def seconds(spent: Spent) -> dict[str, float]:
    """Return the wall-clock and CPU seconds of a process."""
    return {"wall_s": round(spent.wall_s, 3), "cpu_s": round(spent.cpu_s, 3)}


def evaluation(fresh: Fresh, tasks: int, size: int, root: str, runs: int = 1) -> dict[str, float]:
    (Path(root) / "env.py").write_text(ENV)
    command = [
        sys.executable,
        "-m",
        "agentenv",
        "eval",
        "env.py",
        "-m",
        "mock",
        "-n",
        str(tasks),
        "-k",
        str(size),
    ]
    return seconds(fresh.median(command, runs, root))


def peer(fresh: Fresh, python: str, episodes: int, root: str) -> dict[str, float] | None:
    if subprocess.run([python, "-c", "import inspect_ai"], capture_output=True, check=False).returncode:
        print(f"inspect_ai is not installed in {python}, skipped")
        return None
    (Path(root) / "peer.py").write_text(PEER.replace("COUNT", str(episodes)))
    return seconds(fresh.median([python, "peer.py"], 1, root))


def stored_run(root: str, episodes: int, tokens: int) -> Path:
    """Write a large run quickly by repeating one episode with other member numbers."""
    ids = tuple(range(tokens))
    span = TokenSpan("model", ids, tuple(-0.001 * (i % 999) for i in ids), 0, 0)
    turn = Turn(0, {"role": "assistant", "content": "x"}, "stop", tokens)
    one = Trajectory(
        env_id="bench/A-v0",
        task_id="t",
        seed=0,
        group_id="g",
        stop_reason=StopReason.FINAL_ANSWER,
        turns=(turn,),
        sequences=(TokenSequence((span,)),),
        reward=1.0,
    )
    with RunWriter.create("big", runs_dir=root, run_id="big") as writer:
        summary = writer.append(one)
    line = (writer.path / EPISODES).read_bytes()
    with (writer.path / EPISODES).open("ab") as file, (writer.path / INDEX).open("ab") as index:
        for place in range(1, episodes):
            file.write(line)
            index.write(index_line(replace(summary, member=place, offset=place * len(line))))
    return writer.path


def reading(root: str, episodes: int, tokens: int) -> dict[str, float]:
    path = stored_run(root, episodes, tokens)
    began, spent = time.perf_counter(), time.process_time()
    run = Run(path)
    assert len(run.summaries) == episodes
    listed, listed_cpu = time.perf_counter() - began, time.process_time() - spent
    spent = time.process_time()
    run.load(episodes - 1)
    one = (time.process_time() - spent) * 1000
    return {"list_s": round(listed, 3), "list_cpu_s": round(listed_cpu, 3), "load_one_cpu_ms": round(one, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", default=sys.executable)
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}

    def done(name: str, row: dict[str, float]) -> None:
        rows[name] = row
        print(f"{name:<40} " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)

    with tempfile.TemporaryDirectory() as root, fresh_processes() as fresh:
        done("first score", evaluation(fresh, 20, 1, root, runs=5))
        done("only its packages", seconds(fresh.median([sys.executable, "-c", LIBRARIES], 5)))
        done("40 mock episodes, start-up included", evaluation(fresh, 10, 4, root))
        beside = peer(fresh, options.peers, 40, root)
        if beside:
            done("Inspect, 40 mock samples", beside)
        episodes = 1_000 if options.quick else 10_000
        done(f"read a run of {episodes:,} x 3,000 tokens", reading(root, episodes, 3_000))
        if not options.quick:
            done("2,000 mock episodes", evaluation(fresh, 500, 4, root))
    if options.json:
        options.json.write_text(json.dumps({"machine": platform.platform(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
