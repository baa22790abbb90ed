"""Run all benchmarks one after another and keep their JSON, to compare it with that of another run.

    python benchmarks/all.py --quick --into build/bench/before      # as `make bench` does
    python benchmarks/compare.py build/bench/before build/bench/after

A benchmark that fails, or takes longer than its share of the time, is named at the end, and the others run
all the same. With `--quick` all of them together take about five minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = {
    "startup": [],
    "rendering": [],
    "tools": [],
    "runner": [],
    "chat": [],
    "endpoint": [],
    "evaluate": [],
    "viewer": [],
    "sandbox": [],
    "workers": [],
    "worlds": [],
    "self_play": [],
    "simulate": [],
    "stream": [],
    "engines": [],
    "trainer": ["--without", "trl", "--no-truth"],
    "grpo_step": ["--without", "trl"],
}
"""Every script that measures without a server of its own, with options that leave the slowest peers out."""
LEFT_OUT = {
    "agent_learning": "it needs openai-agents beside torch and trains for half an hour",
    "capacity": "it computes and measures nothing",
    "scores": "it scores models on worlds and measures no speed",
    "engines_vllm": "it needs an interpreter with vLLM beside its own",
    "inprocess": "it needs vLLM beside torch; make gpu runs it",
    "delta": "it measures the weights of one training, once",
    "tutorial": "it trains a real model for several minutes",
}
"""Scripts that write figures and do not run with the others, and why."""


def cpu_seconds() -> float:
    """Return the processor time of all processes that ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def run(name: str, options: argparse.Namespace) -> str:
    """Run one benchmark; return why it failed, or an empty text."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(options.into / f"{name}.json")]
    command += [*(["--quick"] if options.quick else []), *SCRIPTS[name]]
    print(f"\n== {name}", flush=True)
    began, cpu_began = time.perf_counter(), cpu_seconds()
    try:
        code = subprocess.run(command, timeout=options.limit, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"it took longer than {options.limit:.0f} s"
    cpu = cpu_seconds() - cpu_began
    print(f"== {name} took {time.perf_counter() - began:.0f} s and {cpu:.0f} CPU-s", flush=True)
    return f"it ended with the exit code {code}" if code else ""


def main() -> int:
    """Run the benchmarks and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small shapes and few repeats")
    parser.add_argument(
        "--into", type=Path, default=Path("build/bench/last"), help="folder of the JSON files"
    )
    parser.add_argument("--only", nargs="*", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="most time of a script")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    failed = {name: reason for name in options.only if (reason := run(name, options))}
    took = time.perf_counter() - began
    print(f"\n{len(options.only)} benchmarks took {took:.0f} s; the figures are in {options.into}")
    for name, reason in failed.items():
        print(f"{name} has no figures: {reason}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
