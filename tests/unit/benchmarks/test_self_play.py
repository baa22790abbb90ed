"""The figures, the table and the picture of self-play, made from measures that are given."""

from __future__ import annotations

import json
import sys

import pytest

from helpers.scripts import load_benchmark

LEARNS = "def learn(steps, seed): return [(0.4, 0.9)] + [(0.3 - 0.01 * n, 0.8 + seed) for n in range(steps)]"


@pytest.fixture
def script(tmp_path, monkeypatch):
    module = load_benchmark("self_play")
    example = tmp_path / "example.py"
    example.write_text(LEARNS)
    monkeypatch.setattr(module, "EXAMPLE", example)
    return module


def test_a_seed_s_figures_are_those_of_its_curve(script):
    row = script.learn(seed=0, steps=20)

    assert (row["before"], row["after"]) == (0.4, pytest.approx(0.11))
    assert row["mean_of_last"] == pytest.approx(0.155)
    assert row["worst_of_last"] == pytest.approx(0.2)
    assert row["least_valid"] == 0.8
    assert len(row["curve"]) == 21


def test_the_table_and_the_file_have_a_row_for_each_seed(script, tmp_path, monkeypatch, capsys):
    target = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["self_play", "--quick", "--json", str(target)])

    script.main()

    shown = capsys.readouterr().out
    assert "| seed 2 | 0.400 | 0.260 | 0.280 | 0.300 |" in shown
    assert [row["name"] for row in json.loads(target.read_text())["seeds"]] == ["seed 0", "seed 1", "seed 2"]


@pytest.mark.slow
def test_the_curves_are_drawn(script, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the plot extra")

    script.draw([script.learn(seed=0, steps=3)], tmp_path / "curves.svg")

    assert ">seed 0<" in (tmp_path / "curves.svg").read_text()
