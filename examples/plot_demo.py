"""Plot training runs, with one colour for each run and one point for each step.

python examples/plot_demo.py runs/demo runs/demo-seed1 runs/demo-seed2 --output demo.svg

Runs of `examples/demo.py` have scores before and after their demonstrations, sampled (with 95 % intervals)
and greedy (dotted). Those of `agentenv train` have one for each evaluation; with `-o eval_on_start=true` the
first, at step 0, is that after the demonstrations.
"""

import argparse
import json
from collections.abc import Sequence
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
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


def draw(runs: Sequence[Path], picture: Path) -> None:
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "demo", "font.size": 8.5}
    figure, grid = plt.subplots(2, 3, figsize=(10, 5.4), layout="constrained")
    axes = grid.flatten()
    metrics = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs
    ]
    # No reward is full marks where each step costs, and without tools there are no calls to draw.
    right = any(step.get("eval/success") for steps in metrics for step in steps)
    curves = {
        name: title
        for name, title in CURVES.items()
        if any(step.get(name) for steps in metrics for step in steps)
    }
    for run, steps, colour in zip(runs, metrics, COLOURS, strict=False):
        has_summary = (run / "summary.json").is_file()
        summary = json.loads((run / ("summary.json" if has_summary else "run.json")).read_text())
        style = {"color": colour, "marker": "o", "markersize": 3.5, "label": f"seed {summary['seed']}"}
        if has_summary:
            drawn = draw_scores(axes[0], summary["scores"], style)
        else:
            axes[0].plot(*points(steps, "eval/success" if right else "eval/reward"), **style)
            axes[0].set_xlabel("GRPO step")
            drawn = drawn_by(summary["config"]["train"])
        axes[0].set_title(f"{'held-out tasks right' if right or has_summary else 'held-out reward'}, {drawn}")
        for panel, name in zip(axes[1:], curves, strict=False):
            panel.plot(*points(steps, name), **style)
    for panel in axes[1 + len(curves) :]:
        panel.set_visible(False)
    for panel, title in zip(axes[1:], curves.values(), strict=False):
        panel.set(title=title, xlabel="GRPO step")
    for panel in axes:
        panel.set_ylim(-0.05, 1.08)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="upper left")
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)


def draw_scores(panel, scores: dict[str, dict[str, list[float]]], style: dict[str, object]) -> str:
    """Draw the demo's scores, and return how they were sampled."""
    names = list(scores)
    sampled = [scores[name]["sampled"] for name in names]
    ends = [[mean - low for mean, low, _ in sampled], [high - mean for mean, _, high in sampled]]
    panel.errorbar(names, [mean for mean, *_ in sampled], yerr=ends, capsize=3, **style)
    greedy = [scores[name]["greedy"][0] for name in names]
    panel.plot(names, greedy, **style | {"linestyle": ":", "markerfacecolor": "none", "label": None})
    return "sampled (greedy dotted)"


def drawn_by(train: dict[str, dict[str, float]]) -> str:
    """Say how the held-out episodes of a training were sampled."""
    warm = train["evaluation"]["eval_temperature"]
    return f"temperature {warm:g}" if warm else "greedy"


def points(steps: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Return the steps that have this metric, and its values."""
    known = [step for step in steps if step.get(name) is not None]
    return [step["step"] for step in known], [step[name] for step in known]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("demo.svg"))
    options = parser.parse_args()
    draw(options.runs, options.output)
