"""Measure the cost of importing agentenv and of `--help`: CPU seconds of fresh processes, and loaded modules.

    python benchmarks/startup.py [--quick] [--json PATH] [--peers DIR]

Peers (verifiers, Inspect, TRL) are measured too if their programs are in the directory named with `--peers`,
such as the `bin` of another virtual environment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

OURS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import agentenv": [sys.executable, "-c", "import agentenv"],
    "agentenv --help": [sys.executable, "-m", "agentenv.cli", "--help"],
    "agentenv eval --help": [sys.executable, "-m", "agentenv.cli", "eval", "--help"],
    "agentenv list": [sys.executable, "-m", "agentenv.cli", "list"],
}
PEERS = {
    "import verifiers": ["python", "-c", "import verifiers"],
    "import inspect_ai": ["python", "-c", "import inspect_ai"],
    "inspect --help": ["inspect", "--help"],
    "trl --help": ["trl", "--help"],
}
LIMITS_S = {"import agentenv": 0.15, "agentenv --help": 0.3}


def cpu_seconds(command: list[str]) -> tuple[float, int]:
    """Return the user plus system CPU seconds of one process, and its lines of output."""
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return spent, len(done.stdout.splitlines())


def measure(name: str, command: list[str], runs: int) -> dict[str, object]:
    """Return the median of several processes, after one that fills the caches."""
    cpu_seconds(command)
    found = [cpu_seconds(command) for _ in range(runs)]
    return {
        "what": name,
        "cpu_s": round(statistics.median(spent for spent, _ in found), 3),
        "lines": found[0][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", type=Path, default=Path(sys.executable).parent)
    options = parser.parse_args()
    runs = 3 if options.quick else 11
    rows = [measure(name, command, runs) for name, command in OURS.items()]
    for name, command in PEERS.items():
        try:
            rows.append(measure(name, [str(options.peers / command[0]), *command[1:]], runs))
        except (OSError, subprocess.CalledProcessError):
            print(f"{name}: not installed in {options.peers}, skipped")
    for row in rows:
        limit = LIMITS_S.get(str(row["what"]))
        note = "" if limit is None else f"   limit {limit}"
        print(f"{row['what']:<24} {row['cpu_s']:>7.3f} CPU-s  {row['lines']:>4} lines{note}")
    if options.json:
        options.json.write_text(json.dumps({"machine": platform.platform(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
