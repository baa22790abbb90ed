"""The recipes hold out what they train on, their oracles are right, and one command trains and tells them."""

from __future__ import annotations

import json
import sys

import pytest

import agentenv as ae
from helpers.scripts import load_benchmark
from helpers.training import saved_tiny

SCRIPT = load_benchmark("recipes")


@pytest.mark.parametrize("name", SCRIPT.NAMES)
def test_the_oracle_of_a_recipe_has_full_marks_on_tasks_that_are_held_out(name):
    spec = ae.spec(str(SCRIPT.RECIPES / f"{name}.py"))
    train, test = ({task.id for task in spec.task_set(split)} for split in ("train", "test"))
    assert train
    assert len(test) >= 50
    assert not train & test

    result = ae.evaluate(spec, "oracle", num_tasks=4)

    assert [summary.reward for summary in result.summaries] == [1.0] * 4


@pytest.mark.slow
def test_a_recipe_is_trained_and_told_by_one_command(tmp_path, monkeypatch, capsys):
    words = [
        "--only",
        "one_turn",
        "--steps",
        "1",
        "--untouched",
        "1",
        "--model",
        f"hf:{saved_tiny(tmp_path)}",
    ]
    words += ["--output", str(tmp_path / "runs"), "--json", str(tmp_path / "told.json")]
    monkeypatch.setattr(sys, "argv", ["recipes.py", *words])

    SCRIPT.main()

    (row,) = json.loads((tmp_path / "told.json").read_text())
    assert {"before", "after", "first", "last", "cpu_s"} < set(row)
    assert "one_turn" in capsys.readouterr().out
