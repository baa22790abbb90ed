"""Keys and values that are kept for later: those of an episode, and those of common prompt beginnings."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from agentenv.engine.hf.buffers import SavedRow

__all__ = ["Beginnings", "KeptRow", "common_prefix"]

MAX_BEGINNINGS = 4
"""Most common beginnings that are kept."""


@dataclass(frozen=True, slots=True)
class KeptRow:
    """Keys and values, together with their tokens."""

    tokens: list[int]
    row: SavedRow


class Beginnings:
    """The most recently used common beginnings of prompts, each for one adapter."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._rows: OrderedDict[tuple[str | None, tuple[int, ...]], KeptRow] = OrderedDict()

    def find(self, adapter: str | None, context: list[int]) -> KeptRow | None:
        """Return the longest beginning with which the context starts, or None."""
        fitting = [
            key
            for key in self._rows
            if key[0] == adapter and len(key[1]) < len(context) and key[1] == tuple(context[: len(key[1])])
        ]
        if not fitting:
            return None
        best = max(fitting, key=lambda key: len(key[1]))
        self._rows.move_to_end(best)
        return self._rows[best]

    def keep(self, adapter: str | None, beginning: KeptRow) -> None:
        """Keep a beginning, and drop the least recently used ones beyond the limits."""
        self._rows[adapter, tuple(beginning.tokens)] = beginning
        while len(self._rows) > MAX_BEGINNINGS or self.nbytes > self._limit:
            self._rows.popitem(last=False)

    def clear(self) -> None:
        """Drop all beginnings."""
        self._rows.clear()

    @property
    def nbytes(self) -> int:
        """Size of the rows in bytes."""
        # The list is a copy, because other threads read this property while the worker changes the rows.
        return sum(kept.row.nbytes for kept in list(self._rows.values()))


def common_prefix(left: list[int], right: list[int]) -> int:
    """Return how many leading tokens two lists share."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    low, high = 0, shorter
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
