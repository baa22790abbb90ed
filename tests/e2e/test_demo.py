"""The demo trains, and its curves are drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from agentenv.training import GRPOConfig
from helpers.training import saved_tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "plot_demo.py"


@pytest.mark.slow
def test_the_demo_scores_a_model_three_times_and_draws_it(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    small = ["--steps", "1", "--demonstrations", "16", "--held-out", "2", "--max-tokens", "120"]
    command = [sys.executable, EXAMPLES / "demo.py", "--model", saved_tiny(tmp_path / "tiny"), *small]

    done = subprocess.run(command, cwd=tmp_path, check=True, timeout=300, capture_output=True, text=True)

    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert list(summary["scores"]) == ["untouched", "demonstrations", "GRPO"]
    for score in summary["scores"].values():
        for mean, low, high in (score["greedy"], score["sampled"]):
            assert low <= mean <= high
    assert 0.1 < summary["demonstrations_right"] < 0.9
    assert "runs/demo/curves.svg" in done.stdout
    assert ">seed 0<" in (tmp_path / "runs" / "demo" / "curves.svg").read_text()


STEP = {"reward": 0.5, "tools/call_frequency": 1.0, "tools/failure_frequency": 0.1}
QUIET = {"frac_reward_zero_std": 1.0}
"""A step that trained nothing."""
ROWS = {
    "demo": [
        *(STEP | {"step": number, "frac_reward_zero_std": 0.5, "entropy": 0.2} for number in (1, 2)),
        STEP | QUIET | {"step": 3},
    ],
    "any": [
        {"step": 0, "eval/success": 0.1},
        STEP | {"step": 1, "frac_reward_zero_std": 0.5, "entropy": 0.2, "eval/success": 0.9},
    ],
}


def a_run(path: Path, seed: int, rows: list[dict[str, float]]) -> Path:
    """Write what is drawn of a run: of the demo with its scores, or of any training."""
    path.mkdir()
    score = {"greedy": [0.0, 0.0, 0.1], "sampled": [0.2, 0.1, 0.3]}
    scores = dict.fromkeys(("untouched", "demonstrations", "GRPO"), score)
    if rows is ROWS["demo"]:
        (path / "summary.json").write_text(json.dumps({"scores": scores, "seed": seed}))
    else:
        settings = {"train": asdict(GRPOConfig(model="smollm2", eval_temperature=1.0))}
        (path / "run.json").write_text(json.dumps({"seed": seed, "config": settings}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seeds", "shown"),
    [
        ("demo", [0, 1], [">seed 0<", ">seed 1<"]),
        ("any", [7], [">seed 7<", ">held-out tasks right, temperature 1<"]),
    ],
)
def test_the_curves_of_trainings_are_drawn_also_where_a_step_trained_nothing(kind, seeds, shown, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    runs = [a_run(tmp_path / str(seed), seed, ROWS[kind]) for seed in seeds]

    picture = tmp_path / "curves.svg"
    subprocess.run([sys.executable, SCRIPT, *runs, "--output", picture], check=True, timeout=120)

    drawn = picture.read_text()
    assert [words for words in shown if words not in drawn] == []
