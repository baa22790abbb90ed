"""The table of goals: values and verdicts, what an earlier night measured, and which rows are old."""

from __future__ import annotations

import json
import sys
from datetime import date

import pytest

from helpers.scripts import load_benchmark

nightly = load_benchmark("nightly")

SCRIPT = """
import json, sys
from pathlib import Path
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"ms": %s}))
"""
GOALS = (
    nightly.Goal("fast", "quick", 2, lambda found: found["ms"], why="it is slow"),
    nightly.Goal("right", "exact", None, lambda found: found["ratio"], least=0.9),
)


@pytest.fixture
def night(tmp_path, monkeypatch):
    """A night of two benchmarks; the second one has no figure for its goal."""
    (tmp_path / "benchmarks").mkdir()
    for name in ("quick", "exact"):
        (tmp_path / "benchmarks" / f"{name}.py").write_text(SCRIPT % 3)
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "PAGE", tmp_path / "nightly.md")
    monkeypatch.setattr(nightly, "GOALS", GOALS)

    def run(*words: str) -> tuple[int, dict[str, list[str]]]:
        monkeypatch.setattr(sys, "argv", ["nightly", "--into", str(tmp_path / "build"), *words])
        return nightly.main(), nightly.read(nightly.PAGE.read_text())

    return run


def test_a_night_writes_each_value_and_says_what_has_none(night, capsys):
    code, rows = night("--times", "2")

    assert code == 1
    assert rows["fast"][1:5] == ["≤ 2", "3, 3", "missed", "it is slow"]
    assert str(date.today().year) in rows["fast"][5]  # noqa: DTZ011 - the year is enough
    assert rows["right"][1:] == ["≥ 0.9", "not measured", "", "", ""]
    assert "not measured: right" in capsys.readouterr().err


def test_what_an_earlier_night_measured_is_kept_and_said_to_be_old_after_a_month(night):
    row = ["right", "≥ 0.9", "0.95", "holds", "", "2 cores, 2026-01-01, 0.1"]
    nightly.PAGE.write_text(f"{nightly.HEAD}| {' | '.join(row)} |\n")
    code, rows = night("--only", "quick")

    assert code == 0
    assert rows["fast"][2] == "3"
    assert rows["right"] == [*row[:3], "**older than a month**", *row[4:]]


@pytest.mark.parametrize(
    ("values", "word"), [([1, 2], "holds"), ([1, 3], "holds in 1 of 2"), ([2.1, 3], "missed")]
)
def test_a_goal_holds_only_where_each_value_does(values, word):
    assert nightly.verdict(GOALS[0], values) == word


def test_the_figures_are_found_in_what_the_benchmarks_write():
    found = {
        "sampler": {
            "sampler": [
                {"rows": rows, "logits": logits, "sampling": "top_p=0.95", "times_plain": 2.0}
                for rows in (8, 32)
                for logits in ("few likely tokens", "hundreds of them")
            ]
        },
    }
    values = {
        goal.what: goal.figure(json.loads(json.dumps(found[goal.script])))
        for goal in nightly.GOALS
        if goal.script in found
    }

    assert list(values.values()) == [2.0, 2.0, 2.0]
