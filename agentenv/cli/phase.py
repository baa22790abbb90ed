"""How far a part of a run is and when it ends: loading, warm-up, playing, updating."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from agentenv.core.visible import visible

__all__ = ["Phase", "left_text", "phase_view"]

WIDTH = 24
"""Columns of a bar."""


def left_text(seconds: float) -> str:
    """Return an estimate of the time that is left, as rough as estimates are."""
    if seconds < 100:
        return f"about {max(1, round(seconds))} s left"
    minutes = round(seconds / 60)
    return f"about {minutes} min left" if minutes < 100 else f"about {minutes / 60:.1f} h left"


@dataclass(slots=True)
class Phase:
    """A part of a run that takes a while."""

    name: str = ""
    """What is done, such as `warm-up step`."""
    share: float = 0.0
    """How much of it is done, from 0 to 1."""
    text: str = ""
    """How much that is, in words."""
    began: float = field(default_factory=time.monotonic)
    share_before: float = 0.0
    """How much of it was done when it began, as in a run that is resumed."""

    def at(self, name: str, done: int, total: int) -> None:
        """Take a report of progress; one of another part, or from the start again, begins it."""
        if name != self.name or done / total < self.share:
            self.name, self.share_before, self.began = name, done / total, time.monotonic()
        self.share, self.text = done / total, f"{name} {done} of {total}"

    def left(self) -> str:
        """Return an estimate of the time left; empty while there is nothing to estimate it from."""
        gone, made = time.monotonic() - self.began, self.share - self.share_before
        return left_text(gone * (1 - self.share) / made) if made > 0 and self.share < 1 else ""

    def line(self) -> str:
        """Return how far it is, on one line."""
        gone = f"{time.monotonic() - self.began:.0f} s"
        return "  ".join(filter(None, [self.text or self.name, self.left() or gone]))


def phase_view(phase: Phase, line: str) -> Any:
    """Return a bar with a line of text beside it, for rich; while nothing is known, the bar only moves."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    total = 1.0 if phase.share else None
    row = Table.grid(padding=(0, 2, 0, 1))
    row.add_row(ProgressBar(total=total, completed=phase.share, width=WIDTH), Text(visible(line)))
    return row
