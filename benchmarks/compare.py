"""Compare two runs of the benchmarks: the figures of their JSON files side by side, as ratios.

    python benchmarks/trainer.py --json old.json          # before a change
    python benchmarks/trainer.py --json new.json          # after it
    python benchmarks/compare.py old.json new.json
    python benchmarks/compare.py OLD_FOLDER NEW_FOLDER    # folders of `make bench`
    python benchmarks/compare.py old.json new.json --worse-than 1.2   # fails if a figure is worse

A figure is found again by its place in the file: by the names above it, and in a table by the texts and the
sizes of its row, so that rows may be added, left out or sorted in another way. The name of a figure says
whether less is better (seconds, bytes, errors) or more (speeds, ratios to a peer). Figures whose names say
neither are listed without a verdict.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = {
    "episodes",
    "rows",
    "turns",
    "tokens",
    "seed",
    "size",
    "concurrency",
    "live",
    "workers",
    "threads",
    "tools",
}
"""Whole numbers that say what a row measured, and are no figures themselves."""
IGNORED = {"load", "lines", "loss"}
"""Numbers that say nothing about speed."""
MORE = ("per_s", "per_minute", "ratio", "faster", "tokens_per", "speed")
LESS = {"ms", "s", "seconds", "bytes", "mb", "error", "cpu", "wall", "rss", "memory", "p50", "p90", "growth"}
NOTICED = 1.1
"""Ratios nearer to 1 than this are called equal."""


@dataclass(frozen=True)
class Change:
    """A figure in both runs."""

    name: str
    old: float
    new: float

    @property
    def ratio(self) -> float:
        """The new figure in times the old one; infinite if the old one is 0."""
        if self.old == self.new:
            return 1.0
        return self.new / self.old if self.old else math.inf

    @property
    def worse(self) -> float | None:
        """How many times worse the new figure is, below 1 if better; None if its name does not say."""
        better = direction(self.name)
        if better == 0 or self.ratio < 0:
            return None
        if self.ratio == 0:
            return 0.0 if better < 0 else math.inf
        return self.ratio if better < 0 else 1 / self.ratio

    @property
    def verdict(self) -> str:
        """One word for the table."""
        if self.worse is None:
            return ""
        return "worse" if self.worse > NOTICED else "better" if self.worse < 1 / NOTICED else ""


def direction(name: str) -> int:
    """Return 1 if more of a figure is better, -1 if less is, and 0 if its name does not say."""
    last = name.rsplit(" / ", 1)[-1].lower()
    if any(part in last for part in MORE):
        return 1
    words = last.replace(",", " ").replace("_", " ").split()
    return -1 if any(word in LESS for word in words) else 0


def figures(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """Yield the figures of a JSON file with their places in it."""
    if isinstance(found, bool) or found is None or isinstance(found, str):
        return
    if isinstance(found, (int, float)):
        if math.isfinite(found):
            yield " / ".join(path), float(found)
        return
    if isinstance(found, dict):
        for name, value in found.items():
            if name not in IGNORED and not is_label(name, value):
                yield from figures(value, (*path, str(name)))
        return
    seen: Counter[str] = Counter()
    for entry in found:
        label = label_of(entry)
        seen[label] += 1
        again = f"#{seen[label]}" if seen[label] > 1 or not label else ""
        yield from figures(entry, (*path, " ".join(filter(None, (label, again)))))


def is_label(name: str, value: Any) -> bool:
    """Return whether a field says what a row measured."""
    return isinstance(value, str) or (name in SIZES and isinstance(value, int))


def label_of(entry: Any) -> str:
    """Return what identifies a row of a table: its texts and sizes."""
    if not isinstance(entry, dict):
        return ""
    labels = {name: value for name, value in entry.items() if is_label(name, value)}
    return ", ".join(value if isinstance(value, str) else f"{value} {name}" for name, value in labels.items())


def read(path: Path) -> dict[str, float]:
    """Return the figures of a file, or of all JSON files in a folder, by name."""
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        return {f"{file.stem} / {name}": value for file in files for name, value in read(file).items()}
    return dict(figures(json.loads(path.read_text())))


def compare(old: dict[str, float], new: dict[str, float]) -> list[Change]:
    """Return the figures that both runs have, in the order of the new run."""
    return [Change(name, old[name], value) for name, value in new.items() if name in old]


def show(changes: list[Change], old: dict[str, float], new: dict[str, float]) -> None:
    """Print the table, and the names of what only one run has."""
    print("| figure | old | new | new / old | |\n|---|---|---|---|---|")
    for change in changes:
        numbers = f"{change.old:.4g} | {change.new:.4g} | {change.ratio:.2f}"
        print(f"| {change.name} | {numbers} | {change.verdict} |")
    for title, names in (
        ("only in the old run", old.keys() - new),
        ("only in the new run", new.keys() - old),
    ):
        if names:
            print(f"\n{title}: {'; '.join(sorted(names))}")
    counts = Counter(change.verdict for change in changes)
    print(f"\n{len(changes)} figures: {counts['better']} better, {counts['worse']} worse by a tenth or more")


def main() -> int:
    """Compare and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a JSON file of a benchmark, or a folder of them")
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--worse-than", type=float, metavar="RATIO", help="fail if a figure is so many times worse"
    )
    options = parser.parse_args()
    for path in (options.old, options.new):
        if not path.exists():
            parser.error(
                f"there is no {path}; write it with --json PATH of a benchmark, or with `make bench`"
            )
    old, new = read(options.old), read(options.new)
    changes = compare(old, new)
    if not changes:
        print("The two runs have no figure in common.", file=sys.stderr)
        return 2
    show(changes, old, new)
    limit = options.worse_than or math.inf
    return int(any(change.worse is not None and change.worse > limit for change in changes))


if __name__ == "__main__":
    sys.exit(main())
