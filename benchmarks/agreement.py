r"""Score random answers by the authors' own code and by ours, and write the table of agreement.

    python benchmarks/agreement.py                       # every world, as many answers as in the whole test
    python benchmarks/agreement.py --quick --only "bfcl single-turn" math
    python benchmarks/agreement.py --write docs/worlds/agreement.md

A world whose package is not installed is named with the reason, and keeps its row of the page, as does every
world that was not compared. `--json` of an older run is continued: worlds that it has are not compared again.
The exit code is 1 if an answer scores differently.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from agreement import WORLDS, compare

QUICK = 8
"""Answers of a world with --quick."""
MARK = "<!-- the table of `python benchmarks/agreement.py --write` -->"
HEAD = "| world | answers | rewarded by the authors | scored the same | measured |\n|---|---|---|---|---|"


def measured(world: str, answers: int | None) -> dict[str, Any]:
    """Compare one world, and return its figures."""
    began = time.process_time()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            result = asyncio.run(compare(world, answers))
    except Exception as error:  # a package is missing, or broken here
        return {"not_compared": f"{type(error).__name__}: {error}"[:300]}
    return {
        "compared": result.compared,
        "rewarded": result.rewarded,
        "differ": result.differ,
        "cpu_s": round(time.process_time() - began, 1),
        "date": datetime.now(UTC).date().isoformat(),
    }


def updated(page: str, figures: dict[str, dict[str, Any]]) -> str:
    """Return a page whose rows of the compared worlds are those of `figures`."""
    before, _, after = page.partition(MARK)
    table, _, rest = after.partition("\n\n## ")
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}
    for world, row in figures.items():
        if "compared" in row:
            same = row["compared"] - len(row["differ"])
            cells = [world, f"{row['compared']:,}", f"{row['rewarded']:,}", f"{same:,}", row["date"]]
            rows[world] = f"| {' | '.join(cells)} |"
    lines = [MARK, HEAD, *(rows[world] for world in WORLDS if world in rows)]
    return before + "\n".join(lines) + "\n" + (f"\n## {rest}" if rest else "")


def main() -> int:
    """Compare the worlds one after another, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", metavar="WORLD", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("-n", "--answers", type=int, help="answers of each world")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args()
    old = options.json is not None and options.json.exists()
    figures: dict[str, Any] = json.loads(options.json.read_text(encoding="utf-8")) if old else {}
    for world in options.only:
        if world not in figures or "not_compared" in figures[world]:
            figures[world] = measured(world, options.answers or (QUICK if options.quick else None))
        row = figures[world]
        print(f"{world:<24} {row.get('not_compared') or ''}", end="")
        if "compared" in row:
            print(f"{row['compared']:>6} compared, {len(row['differ'])} differ, {row['cpu_s']} CPU-s", end="")
        print(*("\n  " + line for line in row.get("differ", ())[:5]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    if options.write is not None:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(updated(page, figures), encoding="utf-8")
    return int(any(row.get("differ") for row in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
