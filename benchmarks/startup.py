"""Measure the cost of importing agentenv and of `--help`: CPU seconds of fresh processes.

    python benchmarks/startup.py [--quick] [--json PATH] [--peers DIR]

Peers (verifiers, Inspect, TRL) are measured too if their programs are in the directory named with `--peers`,
such as the `bin` of another virtual environment.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

from fresh import Fresh, fresh_processes

OURS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import agentenv": [sys.executable, "-c", "import agentenv"],
    "agentenv --help": [sys.executable, "-m", "agentenv", "--help"],
    "agentenv eval --help": [sys.executable, "-m", "agentenv", "eval", "--help"],
    "agentenv list": [sys.executable, "-m", "agentenv", "list"],
}
PEERS = {
    "import verifiers": ["python", "-c", "import verifiers"],
    "import inspect_ai": ["python", "-c", "import inspect_ai"],
    "inspect --help": ["inspect", "--help"],
    "trl --help": ["trl", "--help"],
}
LIMITS_S = {"import agentenv": 0.15, "agentenv --help": 0.3}


def measure(fresh: Fresh, name: str, command: list[str], runs: int) -> dict[str, object]:
    """Return the median of several processes, after one that fills the caches."""
    spent = fresh.median(command, runs)
    return {"what": name, "cpu_s": round(spent.cpu_s, 3), "lines": len(spent.output.splitlines())}


def measure_all(fresh: Fresh, peers: Path, runs: int) -> list[dict[str, object]]:
    """Measure our programs, and those of the peers that are in a directory."""
    rows = [measure(fresh, name, command, runs) for name, command in OURS.items()]
    for name, command in PEERS.items():
        try:
            rows.append(measure(fresh, name, [str(peers / command[0]), *command[1:]], runs))
        except (OSError, subprocess.CalledProcessError):
            print(f"{name}: not installed in {peers}, skipped")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", type=Path, default=Path(sys.executable).parent)
    options = parser.parse_args()
    with fresh_processes() as fresh:
        rows = measure_all(fresh, options.peers, 3 if options.quick else 11)
    for row in rows:
        limit = LIMITS_S.get(str(row["what"]))
        note = "" if limit is None else f"   limit {limit}"
        print(f"{row['what']:<24} {row['cpu_s']:>7.3f} CPU-s  {row['lines']:>4} lines{note}")
    if options.json:
        options.json.write_text(json.dumps({"machine": platform.platform(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
