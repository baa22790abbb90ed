"""Measure what self-play teaches: the exact exploitability of a tiny model in Kuhn poker, for several seeds.

    python benchmarks/self_play.py --json self-play.json --svg self-play.svg     # with three seeds
    python benchmarks/self_play.py --quick

It runs `examples/self_play.py`, unchanged. Exploitability is what an opponent who knows the player wins of it
in a game, computed over the whole game tree from the probabilities of the model, so no game is sampled for
it. It is 0.458 for moves by chance and 0 for the best possible play.
"""

from __future__ import annotations

import argparse
import json
import runpy
import tempfile
import time
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "self_play.py"
CHANCE = 11 / 24
"""Exploitability of moves by chance."""
LAST = 10
"""The number of last steps whose mean and worst value are shown."""


def learn(seed: int, steps: int) -> dict[str, Any]:
    """Train with one seed, and return its figures."""
    example = runpy.run_path(str(EXAMPLE))
    began, cpu_began = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        measured = example["learn"](steps, seed)
    curve = [exploited for exploited, _ in measured]
    last = curve[1:][-LAST:]
    return {
        "name": f"seed {seed}",
        "before": curve[0],
        "after": curve[-1],
        "mean_of_last": fmean(last),
        "worst_of_last": max(last),
        "least_valid": min(valid for _, valid in measured),
        "curve": curve,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print("| exploitability | before | after | mean of the last ten steps | worst of them | CPU-s |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        figures = [f"{row[name]:.3f}" for name in ("before", "after", "mean_of_last", "worst_of_last")]
        print(f"| {row['name']} | {' | '.join(figures)} | {row['cpu_seconds']:.0f} |")
    print(f"A valid move always had a probability of at least {min(row['least_valid'] for row in rows):.3f}.")


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Draw the curves; this needs the `plot` extra."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "self-play", "font.size": 8.5}):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        panel = figure.subplots()
        panel.axhline(CHANCE, color="#777777", linestyle="--", linewidth=1, label="moves by chance")
        for row, colour in zip(rows, ("#0072B2", "#E69F00", "#009E73"), strict=False):
            panel.plot(row["curve"], color=colour, linewidth=1.2, label=row["name"])
        panel.set(xlabel="step of self-play", ylabel="exploitability (chips a game)", ylim=(0, None))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False)
        figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    """Train and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--quick", action="store_true", help="five steps, to try the script")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path, help="picture of the curves; needs matplotlib")
    options = parser.parse_args()
    if find_spec("torch") is None or find_spec("transformers") is None:
        print("skipped: needs torch and transformers")
        return
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        rows.append(learn(seed, 5 if options.quick else options.steps))
        print(f"seed {seed}: {rows[-1]['before']:.3f} -> {rows[-1]['after']:.3f}", flush=True)
        if options.json:  # after each seed, so that an interrupted run keeps those that are done
            options.json.write_text(json.dumps({"seeds": rows}, indent=2) + "\n")
    show(rows)
    if options.svg:
        draw(rows, options.svg)


if __name__ == "__main__":
    main()
