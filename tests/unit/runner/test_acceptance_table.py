"""The table of acceptance tests in docs/internals names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| ([A-D]\d+b?) \| .* \| `([\w/.]+)` `(\w+)` \|$", re.MULTILINE)


IDS = {
    *(f"A{number}" for number in range(1, 16)),
    *(f"B{number}" for number in range(1, 15)),
    *(f"C{number}" for number in range(1, 18)),
    "C16b",
    *(f"D{number}" for number in range(1, 15)),
}
"""The acceptance tests drawn from the systems before this one: 61 of them."""


def test_every_id_has_exactly_one_row():
    listed = [name for name, _, _ in ROW.findall((ROOT / "docs" / "internals" / "acceptance.md").read_text())]

    assert len(IDS) == 61
    assert sorted(listed) == sorted(IDS)


def test_every_row_names_a_test_that_exists():
    rows = ROW.findall((ROOT / "docs" / "internals" / "acceptance.md").read_text())

    for name, file, prefix in rows:
        assert f"def {prefix}" in (ROOT / "tests" / file).read_text(), name


def test_every_test_with_an_id_stands_in_the_table():
    listed = {name for name, _, _ in ROW.findall((ROOT / "docs" / "internals" / "acceptance.md").read_text())}
    folder = ROOT / "tests" / "unit"
    found = set()
    for file in folder.rglob("test_*.py"):
        for run in re.findall(r"def test((?:_[a-d]\d+b?)+)_", file.read_text()):
            found |= {part[0].upper() + part[1:] for part in run.strip("_").split("_")}

    assert found <= listed
