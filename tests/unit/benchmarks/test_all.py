"""All benchmarks in one command: their files stay in one folder, and what fails or is left out is said."""

from __future__ import annotations

import sys

import pytest

from helpers.scripts import load_benchmark

SCRIPT = """
import sys
from pathlib import Path
path = Path(sys.argv[sys.argv.index("--json") + 1])
"""


together = load_benchmark("all")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of benchmarks that only write what they are told to, and the folder of their figures."""
    for name, line in {
        "good": 'path.write_text(\'[{"what": "a", "ms": %d}]\' % (1 + (\'--quick\' in sys.argv)))',
        "bad": "sys.exit(7)",
        "silent": "",
    }.items():
        (tmp_path / f"{name}.py").write_text(SCRIPT + line)
    monkeypatch.setattr(together, "HERE", tmp_path)
    monkeypatch.setattr(together, "SCRIPTS", {"good": [], "bad": [], "silent": []})
    return tmp_path / "figures"


def run(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["all", *words])
    return together.main()


def test_the_others_run_where_one_fails_and_reasons_are_said(folder, monkeypatch, capsys):
    folder.mkdir()
    (folder / "bad.json").write_text('{"ms": 1}')  # of an earlier run

    assert run(monkeypatch, "--quick", "--into", str(folder)) == 1
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "bad has no figures: it ended with the exit code 7",
        "silent has no figures: it wrote no file",
    ]
    assert "| all 3 |" in said.out
    assert all(f"- {name}: {reason}" in said.out for name, reason in together.LEFT_OUT.items())
    assert sorted(path.name for path in folder.iterdir()) == ["all.json", "good.json"]
