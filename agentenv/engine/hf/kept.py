"""Keys and values that are kept for later: those of an episode, and those of common prompt beginnings."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from agentenv.engine.hf.buffers import SavedRow

__all__ = ["Beginnings", "KeptRow", "KeptRows", "common_prefix"]

Key: TypeAlias = tuple[str, str | None]

MAX_BEGINNINGS = 4
"""Most common beginnings that are kept."""


@dataclass(frozen=True, slots=True)
class KeptRow:
    """Keys and values, together with their tokens."""

    tokens: list[int]
    row: SavedRow


class KeptRows:
    """Keys and values of episodes between their turns, by episode and adapter; the oldest come first."""

    # Invariant: `nbytes` is the size of all rows, in which what several of them share counts once.

    def __init__(self) -> None:
        self._rows: OrderedDict[Key, KeptRow] = OrderedDict()
        self._sharing: Counter[SavedRow] = Counter()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def keep(self, key: Key, kept: KeptRow) -> None:
        """Keep a row, in place of an earlier one."""
        self.take(key)
        self._rows[key] = kept
        self.nbytes += kept.row.nbytes
        if (shared := kept.row.shared) is not None:
            self._sharing[shared] += 1
            self.nbytes += shared.nbytes if self._sharing[shared] == 1 else 0

    def take(self, key: Key) -> KeptRow | None:
        """Return a row, which is no longer kept; None if there is none."""
        kept = self._rows.pop(key, None)
        if kept is not None:
            self.nbytes -= kept.row.nbytes
            if (shared := kept.row.shared) is not None:
                self._sharing[shared] -= 1
                if not self._sharing[shared]:
                    del self._sharing[shared]
                    self.nbytes -= shared.nbytes
        return kept

    def clear(self) -> None:
        """Drop all rows."""
        self._rows.clear()
        self._sharing.clear()
        self.nbytes = 0


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
        rows = [kept.row for kept in list(self._rows.values())]
        return sum(row.nbytes + (0 if row.shared is None else row.shared.nbytes) for row in rows)


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
