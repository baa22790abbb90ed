"""The demo trains, and its curves are drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_the_demos_curves_are_drawn_also_where_a_step_trained_nothing(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    runs = [tmp_path / "demo", tmp_path / "demo-seed1"]
    for seed, run in enumerate(runs):
        run.mkdir()
        score = {"greedy": [0.0, 0.0, 0.1], "sampled": [0.2, 0.1, 0.3]}
        scores = {"untouched": score, "demonstrations": score, "GRPO": score}
        (run / "summary.json").write_text(json.dumps({"scores": scores, "seed": seed}))
        step = {"reward": 0.5, "tools/call_frequency": 1.0, "tools/failure_frequency": 0.1}
        steps = [step | {"step": number, "frac_reward_zero_std": 0.5, "entropy": 0.2} for number in (1, 2)]
        steps.append(step | {"step": 3, "frac_reward_zero_std": 1.0})
        (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))

    picture = tmp_path / "demo.svg"
    subprocess.run([sys.executable, SCRIPT, *runs, "--output", picture], check=True, timeout=120)

    assert ">seed 0<" in picture.read_text()
    assert ">seed 1<" in picture.read_text()


@pytest.mark.slow
def test_the_curves_of_any_training_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    (tmp_path / "run.json").write_text('{"seed": 7, "config": {"train": {"eval_temperature": 1.0}}}')
    step = {"reward": 0.5, "tools/call_frequency": 1.0, "tools/failure_frequency": 0.1, "entropy": 0.2}
    steps = [{"step": 0, "eval/success": 0.1}]
    steps += [step | {"step": number, "frac_reward_zero_std": 0.5} for number in (1, 2)]
    steps[-1]["eval/success"] = 0.9
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))

    picture = tmp_path / "run.svg"
    subprocess.run([sys.executable, SCRIPT, tmp_path, "--output", picture], check=True, timeout=120)

    assert ">seed 7<" in picture.read_text()
    assert ">held-out tasks right, temperature 1<" in picture.read_text()
