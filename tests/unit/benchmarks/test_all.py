"""All benchmarks in one command: their files stay in one folder, and what fails or is left out is said."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from helpers.scripts import BENCHMARKS, load_benchmark

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


def test_two_folders_can_be_compared(folder, monkeypatch, capsys):
    folders = [str(folder / "old"), str(folder / "new")]
    run(monkeypatch, "--only", "good", "--into", folders[0])
    run(monkeypatch, "--only", "good", "--quick", "--into", folders[1])
    kept = json.loads((folder / "new" / "all.json").read_text())
    monkeypatch.setattr(sys, "argv", ["compare", *folders])

    assert [share["script"] for share in kept["shares"]] == ["good"]
    assert compare.main() == 0
    said = capsys.readouterr().out
    assert "| good / a / ms | 1 | 2 | 2.00 | worse |" in said
    assert "| all / shares / good / wall_s |" in said


# Figures of two runs are found again by what their rows say, and judged by what their names say


compare = load_benchmark("compare")

ROWS = [
    {"engine": "hf", "episodes": 8, "tokens_per_s": 40.0, "turn_s": [1.0, 2.0]},
    {"engine": "hf", "episodes": 32, "tokens_per_s": 90.0, "turn_s": [3.0, 4.0]},
]


def write(path: Path, found: object) -> Path:
    path.write_text(json.dumps(found))
    return path


def test_rows_are_found_again_in_any_order(tmp_path):
    old = compare.read(write(tmp_path / "old.json", ROWS))
    new = compare.read(write(tmp_path / "new.json", ROWS[::-1]))

    assert old == new
    assert old["hf, 32 episodes / tokens_per_s"] == 90.0
    assert old["hf, 8 episodes / turn_s / #2"] == 2.0


def test_texts_truths_and_numbers_that_say_nothing_are_no_figures():
    found = {"machine": "x", "able": True, "none": None, "load": [1, 2], "nan": float("nan"), "rows": []}

    assert list(compare.figures(found)) == []


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("runner / http / 4 x 100, 8 at once / ms", -1),
        ("ours / cpu_seconds", -1),
        ("peak_rss_mb", -1),
        ("startup / import agentenv / cpu_s", -1),
        ("tokens_per_s", 1),
        ("cpu_faster_than_plain", 1),
        ("cpu_ratio", 1),
        ("reward", 0),
    ],
)
def test_the_name_of_a_figure_says_what_is_better(name, better):
    assert compare.direction(name) == better


@pytest.mark.parametrize(
    ("name", "old", "new", "verdict"),
    [
        ("ms", 1.0, 1.05, ""),
        ("ms", 1.0, 1.2, "worse"),
        ("ms", 1.2, 1.0, "better"),
        ("tokens_per_s", 1.0, 1.2, "better"),
        ("tokens_per_s", 1.2, 1.0, "worse"),
        ("tokens_per_s", 1.2, 0.0, "worse"),
        ("ms", 0.0, 1.0, "worse"),
        ("ms", 0.0, 0.0, ""),
        ("reward", 1.0, 5.0, ""),
    ],
)
def test_a_change_of_a_tenth_has_a_verdict(name, old, new, verdict):
    assert compare.Change(name, old, new).verdict == verdict


def test_folders_are_compared_file_by_file(tmp_path, capsys, monkeypatch):
    for folder, ms in (("old", 1.0), ("new", 2.0)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "runner.json", {"http": [{"what": "4 x 100", "ms": ms}]})
    write(tmp_path / "new" / "tools.json", {"ms": 1.0})
    monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path / "old"), str(tmp_path / "new")])

    assert compare.main() == 0

    printed = capsys.readouterr().out
    assert "| runner / http / 4 x 100 / ms | 1 | 2 | 2.00 | worse |" in printed
    assert "only in the new run: tools / ms" in printed
    assert "1 figures: 0 better, 1 worse" in printed


@pytest.mark.parametrize(("limit", "code"), [("1.5", 1), ("2.5", 0)])
def test_a_limit_makes_a_worse_figure_fail(limit, code, tmp_path, monkeypatch):
    files = [str(write(tmp_path / f"{ms}.json", {"ms": ms})) for ms in (1.0, 2.0)]
    monkeypatch.setattr(sys, "argv", ["compare", *files, "--worse-than", limit])

    assert compare.main() == code


def test_runs_without_a_common_figure_are_refused(tmp_path, monkeypatch, capsys):
    files = [str(write(tmp_path / f"{name}.json", {name: 1.0})) for name in ("a", "b")]
    monkeypatch.setattr(sys, "argv", ["compare", *files])

    assert compare.main() == 2
    assert "no figure in common" in capsys.readouterr().err


def test_every_script_that_writes_figures_runs_with_the_others():
    writes = {
        path.stem
        for path in BENCHMARKS.glob("*.py")
        if re.search(r'add_argument\("--json"', path.read_text()) and "--quick" in path.read_text()
    }

    together = load_benchmark("all")
    assert writes == {*together.SCRIPTS, *together.LEFT_OUT}


# The command that writes the table of agreement -------------------------------------------


OLD = "| math | 500 | 175 | 500 | 2026-11-25 |"


def test_worlds_that_were_not_compared_keep_their_rows_of_the_page():
    agreement = load_benchmark("agreement")
    page = f"# Title\n\n{agreement.MARK}\n{agreement.HEAD}\n{OLD}\n| arc | 1 | 1 | 1 | then |\n\n## Next\n\n| arc | x |\n"
    arc = {"compared": 1500, "rewarded": 20, "differ": ["a"], "cpu_s": 1.0, "date": "2026-11-26"}

    written = agreement.updated(page, {"arc": arc, "crafter": {"not_compared": "no package"}})

    new = "| arc | 1,500 | 20 | 1,499 | 2026-11-26 |"
    assert written == page.replace("| arc | 1 | 1 | 1 | then |", new)


def test_rows_that_say_the_same_are_numbered():
    found = dict(compare.figures([{"how": "a", "ms": 1.0}, {"how": "a", "ms": 2.0}]))

    assert found == {"a / ms": 1.0, "a #2 / ms": 2.0}
