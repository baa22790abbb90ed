"""Means, standard deviations and sums that can be merged exactly over micro-batches and processes.

A mean of means is wrong if the parts differ in size. Each number therefore keeps the values or sums that it
was computed from, until the parts of all micro-batches and all processes are merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import nan
from typing import Self

from torch import Tensor

from agentenv.training.objective.advantage import standard_deviation

__all__ = ["EXTREMES", "Mean", "Meter", "Spread", "applies"]

EXTREMES: dict[str, Callable[[Iterable[float]], float]] = {
    "max": max,
    "max_length": max,
    "abs_max": max,
    "high_max": max,
    "min_length": min,
    "low_min": min,
}
"""How metrics are merged whose names end in one of these: by their largest or their smallest value."""


class Mean(float):
    """A mean that keeps its sum and count, so that means of several processes can be merged exactly."""

    __slots__ = ("count", "otherwise", "total")

    def __new__(cls, total: float, count: float, otherwise: float = nan) -> Self:
        """Return `total / count`; `otherwise` if the count is 0."""
        mean = super().__new__(cls, total / count if count else otherwise)
        mean.total, mean.count, mean.otherwise = total, count, otherwise
        return mean

    def __getnewargs__(self) -> tuple[float, float, float]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.total, self.count, self.otherwise

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the mean over everything that was counted for the parts."""
        return cls(
            sum(part.total for part in parts),
            sum(part.count for part in parts),
            otherwise=parts[0].otherwise,
        )


class Spread(float):
    """An unbiased standard deviation that keeps its values; 0.0 for fewer than two."""

    __slots__ = ("values",)

    def __new__(cls, values: Sequence[float]) -> Self:
        """Return the standard deviation of the values."""
        spread = super().__new__(cls, standard_deviation(values))
        spread.values = tuple(values)
        return spread

    def __getnewargs__(self) -> tuple[tuple[float, ...]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (self.values,)

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the standard deviation of the values of all parts."""
        return cls([value for part in parts for value in part.values])


class Meter:
    """Collects sums and extremes of micro-batches; tensors are read at the end, to avoid device waits."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor | float]] = {}
        self._counts: dict[str, int] = {}
        self._extremes: dict[str, list[Tensor]] = {}

    def add(self, sums: Mapping[str, Tensor | float], count: int) -> None:
        """Add sums over `count` tokens."""
        for name, value in sums.items():
            self._sums.setdefault(name, []).append(value)
            self._counts[name] = self._counts.get(name, 0) + count

    def add_extremes(self, extremes: Mapping[str, Tensor]) -> None:
        """Record values of which `result` returns the largest or smallest, as `EXTREMES` says."""
        for name, value in extremes.items():
            self._extremes.setdefault(name, []).append(value)

    def result(self) -> dict[str, float]:
        """Return the means, each a `Mean`, and the extremes."""
        means: dict[str, float] = {
            name: Mean(sum(map(float, values)), self._counts[name])
            for name, values in self._sums.items()
            if self._counts[name]
        }
        picked = ((name, EXTREMES[name.rpartition("/")[2]], of) for name, of in self._extremes.items())
        return means | {name: pick(map(float, values)) for name, pick, values in picked}


def applies(norm: float) -> bool:
    """Return whether a gradient of this norm is applied: the norm must be finite and above 0."""
    return 0.0 < norm < math.inf
