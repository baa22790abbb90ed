"""Train SmolLM2 on small tasks of different kinds with nothing but defaults, and say which of them it learns.

    python benchmarks/recipes.py --seeds 0 1 2 --json recipes.json
    python benchmarks/recipes.py --only one_turn penalties

Each recipe is a file in `benchmarks/recipes/` and is trained by `agentenv train FILE -m smollm2 --steps N
--seed S`. Before it, the untouched model is asked tasks of the held-out split, greedily; the training asks
all of that split at its end. What GRPO adds to the demonstrations shows in the first and last two rewards.

The agent needs `openai`, and pictures a model that sees, which is no part of this: `examples/pictures.py`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

RECIPES = Path(__file__).parent / "recipes"
NAMES = ("one_turn", "several_turns", "penalties", "few_demonstrations", "agent")


def told(*words: str) -> tuple[dict[str, Any], float]:
    """Return what a command of agentenv tells as JSON, and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "agentenv", *words, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), spent


def learn(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one recipe with one seed, and return its figures."""
    file, runs = str(RECIPES / f"{name}.py"), options.output / f"{name}-{seed}"
    common = ("-m", options.model, "--seed", str(seed), "--runs-dir", str(runs))
    untouched, _ = told("eval", file, *common, "-n", str(options.untouched), "-o", "temperature=0")
    trained, cpu_s = told("train", file, *common, "--steps", str(options.steps))
    lines = (runs / trained["run"] / "metrics.jsonl").read_text().splitlines()
    rewards = [step["reward"] for step in map(json.loads, lines) if "reward" in step]
    return {
        "recipe": name,
        "seed": seed,
        "before": untouched["success"]["mean"],
        "after": trained["eval/success"],
        "first": fmean(rewards[:2]),
        "last": fmean(rewards[-2:]),
        "cpu_s": cpu_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--untouched", type=int, default=20, help="held-out tasks of the untouched model")
    parser.add_argument("--output", type=Path, default=Path("runs/recipes"), help="directory of the runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("recipe              seed  before  after  reward first, last  CPU-s")
    for name in options.only:
        for seed in options.seeds:
            rows.append(row := learn(name, seed, options))
            print(
                f"{name:18} {seed:5} {row['before']:7.2f} {row['after']:6.2f}  {row['first']:12.2f}, "
                f"{row['last']:4.2f} {row['cpu_s']:6.0f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
