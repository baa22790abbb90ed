"""Plot training runs, with one colour for each run and one point for each step.

python examples/plot_demo.py runs/demo runs/demo-seed1 runs/demo-seed2 --output demo.svg

Runs of `examples/demo.py` have a score before and after their demonstrations. Those of `agentenv train` have
one for each evaluation; with `-o eval_on_start=true` the first, at step 0, is that after the demonstrations.
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

CURVES = {
    "reward": "mean reward of the sampled episodes",
    "tools/call_frequency": "tool calls an episode",
    "tools/failure_frequency": "share of tool calls that failed",
    "frac_reward_zero_std": "share of groups without anything to learn",
    "entropy": "entropy of a trained token (nats)",
}
SCORES = {"before": "untouched", "after_warmup": "demonstrations", "after": "GRPO"}
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("demo.svg"))
    options = parser.parse_args()
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "demo", "font.size": 8.5}
    figure, grid = plt.subplots(2, 3, figsize=(10, 5.4), layout="constrained")
    axes, drawn = grid.flatten(), "greedy"
    for run, colour in zip(options.runs, COLOURS, strict=False):
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        has_summary = (run / "summary.json").is_file()
        summary = json.loads((run / ("summary.json" if has_summary else "run.json")).read_text())
        style = {"color": colour, "marker": "o", "markersize": 3.5, "label": f"seed {summary['seed']}"}
        if has_summary:
            axes[0].plot(SCORES.values(), [summary[name] for name in SCORES], **style)
        else:
            axes[0].plot(*points(steps, "eval/success"), **style)
            axes[0].set_xlabel("GRPO step")
            drawn = drawn_by(summary["config"]["train"])
        for panel, name in zip(axes[1:], CURVES, strict=True):
            panel.plot(*points(steps, name), **style)
    axes[0].set_title(f"held-out tasks right, {drawn}")
    for panel, title in zip(axes[1:], CURVES.values(), strict=True):
        panel.set(title=title, xlabel="GRPO step")
    for panel in axes:
        panel.set_ylim(-0.05, 1.08)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="upper left")
    figure.savefig(options.output, metadata={"Date": None})


def drawn_by(train: dict[str, float]) -> str:
    """Say how the held-out episodes of a training were sampled."""
    warm = train["eval_temperature"]
    return f"temperature {warm:g}" if warm else "greedy"


def points(steps: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Return the steps that have this metric, and its values."""
    known = [step for step in steps if step.get(name) is not None]
    return [step["step"] for step in known], [step[name] for step in known]


if __name__ == "__main__":
    main()
