"""The notebooks of the examples run from top to bottom, as in Jupyter: inside a running event loop."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))
assert NOTEBOOKS


def sources(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last line, which a notebook displays."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
async def test_a_notebook_runs_and_its_cells_show_something(notebook: Path, capsys):
    names: dict[str, Any] = {"__name__": "__main__"}

    shown = [value for source in sources(notebook) if (value := run_cell(source, names)) is not None]

    assert shown[-1]._repr_html_()
    assert names["episode"].reward == 1.0
    assert "pass@4" in capsys.readouterr().out


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_is_listed(notebook: Path):
    cells = json.loads(notebook.read_text())["cells"]

    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if "outputs" in cell)
    assert f"`{notebook.name}`" in (notebook.parents[1] / "docs" / "examples.md").read_text()
