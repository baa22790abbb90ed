"""The table of acceptance tests in the documentation and the tests' docstrings agree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([A-D]\d+b?) \| .* \| `([\w/.]+)` `(\w+)` \|$", re.MULTILINE)
MENTION = re.compile(r"^Acceptance ([A-D]\d+b?(?:, [A-D]\d+b?)*)[.:]")

IDS = {
    *(f"A{number}" for number in range(1, 16)),
    *(f"B{number}" for number in range(1, 15)),
    *(f"C{number}" for number in range(1, 18)),
    "C16b",
    *(f"D{number}" for number in range(1, 15)),
}
"""The acceptance tests drawn from the systems before this one: 61 of them."""


def rows() -> list[tuple[str, str, str]]:
    """Return id, file and test of each row, from whichever page holds the table."""
    pages = [ROOT / "docs" / "internals" / "acceptance.md", ROOT / "docs" / "runner.md"]
    tables = [ROW.findall(page.read_text()) for page in pages if page.is_file()]
    return next(table for table in tables if table)


def mentions() -> Iterator[tuple[str, str, str]]:
    """Yield id, file and test of each id that the docstring of a test names."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if '"""Acceptance ' in text else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                named = MENTION.match(ast.get_docstring(node) or "")
                for name in named[1].split(", ") if named else ():
                    yield name, file.relative_to(ROOT / "tests").as_posix(), node.name


def test_every_id_has_exactly_one_row():
    assert len(IDS) == 61
    assert sorted(name for name, _, _ in rows()) == sorted(IDS)


def test_every_row_names_a_test_whose_docstring_names_the_row():
    assert set(rows()) <= set(mentions())


def test_every_id_in_a_docstring_stands_in_the_table():
    assert {name for name, _, _ in mentions()} <= {name for name, _, _ in rows()}
