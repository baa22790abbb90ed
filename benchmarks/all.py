"""Run all benchmarks one after another and keep their JSON, to compare it with that of another run.

    python benchmarks/all.py --quick --into build/bench/before      # as `make bench` does
    python benchmarks/compare.py build/bench/before build/bench/after

A benchmark that fails, or takes longer than its share of the time, is named at the end, and the others run
all the same. The last table says what part of the time each took, and which scripts were left out and why.
With `--quick` all of them together take about five minutes on two idle cores; on a busy machine the processor
time says how long they would take on an idle one. `all.json` in the folder holds the times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
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
    "fleet": [],
    "worlds": [],
    "self_play": [],
    "stream": [],
    "sampler": [],
    "images": [],
    "engines": [],
    "optimizer": [],
    "trainer": ["--without", "trl", "saving", "--no-truth", "--threads", "1"],
    "grpo_step": ["--without", "trl", "--threads", "1"],
}
"""Every script that measures without a server of its own, with options that leave the slowest peers out.

All have one thread, because two wait for each other and so measure what else the machine does.
"""
LEFT_OUT = {
    "agreement": "it compares scores and measures no speed",
    "agent_learning": "it needs openai-agents beside torch and trains for half an hour",
    "capacity": "it computes and measures nothing",
    "scores": "it scores models on worlds and measures no speed",
    "own_server": "it needs vLLM beside torch; make gpu runs it",
    "large": "its layers need a GPU; make gpu runs it",
    "packs": "it compares kernels of a GPU; make gpu runs it",
    "tutorial": "it trains a real model for several minutes",
}
"""Scripts that write figures and do not run with the others, and why."""


@dataclass(frozen=True)
class Share:
    """What one benchmark took."""

    script: str
    wall_s: float
    cpu_s: float
    failed: str | None = None
    """Why it has no figures; None if it has."""


def cpu_seconds() -> float:
    """Return the processor time of all processes that ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def run(name: str, options: argparse.Namespace) -> Share:
    """Run one benchmark; a figure of an earlier run is not left in the folder."""
    figures = options.into / f"{name}.json"
    figures.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(figures)]
    command += [*(["--quick"] if options.quick else []), *SCRIPTS[name]]
    print(f"\n== {name}", flush=True)
    began, cpu_began = time.perf_counter(), cpu_seconds()
    failed = None
    try:
        variables = {"OMP_NUM_THREADS": "1", **os.environ}
        if code := subprocess.run(command, env=variables, timeout=options.limit, check=False).returncode:
            failed = f"it ended with the exit code {code}"
        elif not figures.exists():
            failed = "it wrote no file"
    except subprocess.TimeoutExpired:
        failed = f"it took longer than {options.limit:.0f} s"
    share = Share(name, round(time.perf_counter() - began, 1), round(cpu_seconds() - cpu_began, 1), failed)
    print(f"== {name} took {share.wall_s:.0f} s and {share.cpu_s:.0f} CPU-s", flush=True)
    return share


def show(shares: list[Share]) -> None:
    """Print what part of the time each benchmark took, what failed, and what was left out."""
    wall, cpu = sum(share.wall_s for share in shares), sum(share.cpu_s for share in shares)
    print("\n| benchmark | s | CPU-s | of the CPU time |\n|---|---|---|---|")
    for share in sorted(shares, key=lambda share: -share.cpu_s):
        part = share.cpu_s / cpu if cpu else 0.0
        print(f"| {share.script} | {share.wall_s:.0f} | {share.cpu_s:.0f} | {part:.0%} |")
    print(f"| all {len(shares)} | {wall:.0f} | {cpu:.0f} | |\n\nLeft out:")
    for name, reason in LEFT_OUT.items():
        print(f"- {name}: {reason}")


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
    load = os.getloadavg()[0]
    shares = [run(name, options) for name in options.only]
    show(shares)
    kept = {
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "load": load,
        "shares": [asdict(share) for share in shares if not share.failed],
        "failed": {share.script: share.failed for share in shares if share.failed},
    }
    (options.into / "all.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(f"\nThe figures are in {options.into}; the load was {load:.1f} at the beginning.")
    failed = [share for share in shares if share.failed]
    for share in failed:
        print(f"{share.script} has no figures: {share.failed}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
