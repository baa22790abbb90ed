"""How far a part of a run is and when it ends: loading, warm-up, playing, updating."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from agentenv.core.cache import cache_directory
from agentenv.core.visible import visible

__all__ = ["Phase", "left_text", "loading", "phase_view"]

WIDTH = 24
"""Columns of a bar."""
FIRST_S, LEAST = 30.0, 0.01
"""Until so many seconds are gone, this share must be done before an estimate is made from it."""
LONG_S = 2.0
"""Seconds from which a loading is worth an estimate."""


def left_text(seconds: float) -> str:
    """Return an estimate of the time that is left, as rough as estimates are."""
    if seconds < 100:
        return f"about {max(1, round(seconds))} s left"
    minutes = round(seconds / 60)
    return f"about {minutes} min left" if minutes < 100 else f"about {minutes / 60:.1f} h left"


def loading(model: str) -> Phase:
    """Return the phase in which a model is loaded; the last time on this machine tells when it ends."""
    phase = Phase(f"loading {model}".rstrip())
    with suppress(OSError, ValueError):
        phase.usual_s = float(phase.kept.read_text())
    return phase


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
    usual_s: float = 0.0
    """Seconds that it took the last time, where nothing else tells how far it is; 0 if that is not known."""

    @property
    def kept(self) -> Path:
        """The file that keeps how long it took."""
        return cache_directory() / "seconds" / blake2b(self.name.encode(), digest_size=8).hexdigest()

    @property
    def gone_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def keep(self) -> None:
        """Keep how long it took, as the estimate of the next time."""
        if self.gone_s > LONG_S:
            with suppress(OSError):
                self.kept.parent.mkdir(parents=True, exist_ok=True)
                self.kept.write_text(f"{self.gone_s:.1f}")

    def at(self, name: str, done: int, total: int) -> None:
        """Take a report of progress; one of another part, or from the start again, begins it."""
        if name != self.name or done / total < self.share:
            self.usual_s = 0.0
            self.name, self.share_before, self.began = name, done / total, time.monotonic()
        self.share, self.text = done / total, f"{name} {done} of {total}"

    def left(self) -> str:
        """Return an estimate of the time left; empty while there is nothing to estimate it from."""
        if self.gone_s < self.usual_s:
            return left_text(self.usual_s - self.gone_s)
        made = self.share - self.share_before
        # The first seconds are those of the first pass, which is slow and says nothing of the others.
        tells = made > (LEAST if self.gone_s < FIRST_S else 0)
        return left_text(self.gone_s * (1 - self.share) / made) if tells and self.share < 1 else ""

    def line(self) -> str:
        """Return how far it is, on one line."""
        return "  ".join(filter(None, [self.text or self.name, self.left() or f"{self.gone_s:.0f} s"]))


def phase_view(phase: Phase, line: str) -> Any:
    """Return a bar with a line of text beside it, for rich; while nothing is known, the bar only moves."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    share = phase.share or (phase.gone_s / phase.usual_s if phase.gone_s < phase.usual_s else 0.0)
    row = Table.grid(padding=(0, 2, 0, 1))
    bar = ProgressBar(total=1.0 if share else None, completed=share, width=WIDTH)
    row.add_row(bar, Text(visible(line)))
    return row
