"""The statistics that evaluations report, in plain Python.

Sources: cluster-robust variance of a mean as in Miller, "Adding Error Bars to Evals"
(arXiv:2411.00640, section 3); unbiased pass@k as in Chen et al. (arXiv:2107.03374, equation 1);
pass^k as in Yao et al., tau-bench (arXiv:2406.12045, section 4); Wilson's score interval for shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, exp, isclose, lgamma, log, sqrt
from random import Random
from statistics import NormalDist

__all__ = [
    "Interval",
    "RunningMean",
    "bootstrap_mean",
    "clustered_mean",
    "mean_of",
    "pass_all_k",
    "pass_at_k",
    "quantile",
    "student_t_quantile",
]


CONFIDENCE = 0.95
"""Confidence of all intervals."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float
    num_values: int
    num_clusters: int


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of values; 0 if there are none."""
    return sum(values) / len(values) if values else 0.0


def pass_at_k(num_tried: int, num_passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of k attempts passes (pass@k).

    Raises:
        ValueError: k is not between 1 and `num_tried`, or `num_passed` is larger than `num_tried`.
    """
    _check_k(num_tried, num_passed, k)
    return 1.0 - comb(num_tried - num_passed, k) / comb(num_tried, k)


def pass_all_k(num_tried: int, num_passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that all of k attempts pass (pass^k).

    Raises:
        ValueError: k is not between 1 and `num_tried`, or `num_passed` is larger than `num_tried`.
    """
    _check_k(num_tried, num_passed, k)
    return comb(num_passed, k) / comb(num_tried, k)


def _check_k(num_tried: int, num_passed: int, k: int) -> None:
    if not 1 <= k <= num_tried:
        raise ValueError(f"k must be between 1 and the number of attempts ({num_tried}), not {k}")
    if not 0 <= num_passed <= num_tried:
        raise ValueError(
            f"num_passed must be between 0 and the number of attempts ({num_tried}), not {num_passed}"
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of unsorted values, with linear interpolation (numpy's default).

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("a quantile needs at least one value, but there are none")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def clustered_mean(clusters: Mapping[str, Sequence[float]]) -> Interval:
    """Return the mean of all values, with an interval that counts each cluster as one independent draw.

    Episodes of the same task resemble each other, so the tasks are the independent draws. If there is only
    one cluster, its values count as the draws, and the interval holds for that task alone. If all values are
    0 or 1, the interval is Wilson's for the effective number of draws, so that 20 successes out of 20 do not
    give "1.000 ± 0".

    Raises:
        ValueError: There are no values.
    """
    groups = [list(values) for values in clusters.values() if values]
    if len(groups) == 1:
        groups = [[value] for value in groups[0]]
    count = sum(map(len, groups))
    if not count:
        raise ValueError("a mean needs at least one value, but there are none")
    mean = sum(map(sum, groups)) / count
    num = len(groups)
    variance = 0.0
    if num > 1:
        residuals = [sum(value - mean for value in group) for group in groups]
        variance = num / (num - 1) * sum(residual * residual for residual in residuals) / count**2
    binary = all(value in (0.0, 1.0) for group in groups for value in group)
    shares = all(0.0 <= value <= 1.0 for group in groups for value in group)
    return _interval(mean, variance, count, num, binary=binary, shares=shares)


def _interval(mean: float, variance: float, count: int, num: int, *, binary: bool, shares: bool) -> Interval:
    """Return the interval of a mean of `count` values in `num` clusters, from the variance of the mean.

    Where all values lie between 0 and 1, so does the interval.
    """
    if binary:
        draws = mean * (1 - mean) / variance if variance > 0 else float(num)
        low, high = _wilson(mean, max(1.0, min(draws, count)))
        return Interval(mean, low, high, count, num)
    spread = student_t_quantile(0.5 + CONFIDENCE / 2, num - 1) * sqrt(variance) if num > 1 else float("inf")
    low, high = mean - spread, mean + spread
    if shares and num > 1:
        low, high = max(0.0, low), min(1.0, high)
    return Interval(mean, low, high, count, num)


class RunningMean:
    """The mean of values that arrive one at a time, with the interval of `clustered_mean`.

    Adding a value and computing the interval cost the same however many values there are.
    """

    # Invariant: with the sum s and the size n of each cluster, `_sums` holds the sums of s*s, s*n and n*n.

    def __init__(self) -> None:
        self.count = 0
        self._total = self._squares = 0.0
        self._binary = self._shares = True
        self._clusters: dict[str, tuple[float, int]] = {}
        self._sums = (0.0, 0.0, 0)

    @property
    def mean(self) -> float:
        """The mean of the values; 0 if there are none."""
        return self._total / self.count if self.count else 0.0

    def add(self, cluster: str, value: float) -> None:
        """Add a value of a cluster."""
        total, size = self._clusters.get(cluster, (0.0, 0))
        self._clusters[cluster] = (total + value, size + 1)
        squares, products, sizes = self._sums
        squares += (total + value) ** 2 - total**2
        products += (total + value) * (size + 1) - total * size
        self._sums = (squares, products, sizes + 2 * size + 1)
        self.count += 1
        self._total += value
        self._squares += value * value
        self._binary = self._binary and value in (0.0, 1.0)
        self._shares = self._shares and 0.0 <= value <= 1.0

    def interval(self) -> Interval:
        """Return the mean of the values so far with its interval.

        Raises:
            ValueError: There are no values.
        """
        if not self.count:
            raise ValueError("a mean needs at least one value, but there are none")
        mean, num = self.mean, len(self._clusters)
        squares, products, sizes = self._sums
        if num == 1:  # the values themselves count as the draws
            num, squares, products, sizes = self.count, self._squares, self._total, self.count
        residuals = max(0.0, squares - 2 * mean * products + mean * mean * sizes)
        variance = num / (num - 1) * residuals / self.count**2 if num > 1 else 0.0
        return _interval(mean, variance, self.count, num, binary=self._binary, shares=self._shares)


def _wilson(share: float, draws: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    centre = (share + z * z / (2 * draws)) / (1 + z * z / draws)
    spread = z * sqrt(share * (1 - share) / draws + z * z / (4 * draws**2)) / (1 + z * z / draws)
    # Rounding must not leave the share itself outside.
    return max(0.0, min(share, centre - spread)), min(1.0, max(share, centre + spread))


def bootstrap_mean(values: Sequence[float], *, seed: int = 0, resamples: int = 4000) -> Interval:
    """Return the mean of paired differences with a percentile bootstrap interval.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("a mean needs at least one value, but there are none")
    draw = Random(seed)
    count = len(values)
    means = sorted(sum(draw.choices(values, k=count)) / count for _ in range(resamples))
    tail = (1 - CONFIDENCE) / 2
    return Interval(sum(values) / count, quantile(means, tail), quantile(means, 1 - tail), count, count)


def student_t_quantile(share: float, degrees: int) -> float:
    """Return a quantile of Student's t distribution, by bisection of its distribution function.

    Raises:
        ValueError: `share` is not between 0 and 1, or `degrees` is less than 1.
    """
    if not 0 < share < 1 or degrees < 1:
        raise ValueError(f"share must be between 0 and 1, not {share}, and degrees at least 1, not {degrees}")
    if share < 0.5:
        return -student_t_quantile(1 - share, degrees)
    low, high = 0.0, 1.0
    while _t_cdf(high, degrees) < share:
        high *= 2
    while not isclose(low, high, rel_tol=1e-12, abs_tol=1e-12):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, degrees) < share else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, degrees: int) -> float:
    """Return P(T <= t) for t >= 0."""
    return 1.0 - 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function (continued fraction, modified Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1 - x)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log(1 - x)) / a
    tiny = 1e-300
    fraction, c, d = 1.0, 1.0, 0.0
    for step in range(500):
        half = step // 2
        if step == 0:
            factor = 1.0
        elif step % 2:
            factor = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            factor = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        d = 1 / ((1 + factor * d) or tiny)
        c = (1 + factor / c) or tiny
        fraction *= c * d
        if step and abs(1 - c * d) < 1e-14:
            break
    return front * (fraction - 1)
