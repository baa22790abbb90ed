"""Metrics of a step, and the means, spreads and sums from which those of the global batch are merged exactly.

A mean of means is wrong if the parts differ in size. Each number therefore keeps the values or sums that it
was computed from, until the parts of all micro-batches and all processes are merged. Metrics that TRL has too
use TRL's names, so that dashboards made for TRL work here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan
from typing import Any, NamedTuple, Self

from torch import Tensor

from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.training.objective.advantage import standard_deviation
from agentenv.training.rows import Scores

__all__ = ["EXTREMES", "Mean", "Meter", "Spread", "Update", "applies", "episode_metrics", "update_metrics"]

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

    def extend(self, other: Meter) -> None:
        """Add everything that another meter has collected."""
        for name, values in other._sums.items():
            self._sums.setdefault(name, []).extend(values)
            self._counts[name] = self._counts.get(name, 0) + other._counts[name]
        for name, values in other._extremes.items():
            self._extremes.setdefault(name, []).extend(values)

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


def episode_metrics(
    groups: Sequence[TrajectoryGroup],
    *,
    weights_version: int = 0,
    gather: Callable[[Sequence[Any]], Sequence[Any]] = list,
) -> dict[str, float]:
    """Return the metrics of a batch's episodes, over all of them and for each environment.

    Means are `Mean`s and standard deviations `Spread`s, which `World.merge` can merge exactly.

    Args:
        groups: the episodes.
        weights_version: the trainer's weights version before the step; the tokens' age is counted from it.
        gather: returns the values of all processes, which may have played different environments.
    """
    episodes = [episode for group in groups for episode in group]
    environments = sorted({episode.env_id for episode in episodes})
    several = len(set(gather(environments))) > 1
    if not episodes:
        return {"episodes": 0.0}
    metrics = _describe(episodes) | _staleness(episodes, weights_version)
    for env_id in environments if several else ():
        played = [episode for episode in episodes if episode.env_id == env_id]
        metrics |= {f"{env_id}/{name}": value for name, value in _describe(played).items()}
        rewards = [episode.reward for episode in played if episode.reward is not None]
        if rewards:
            metrics[f"{env_id}/reward"] = Mean(sum(rewards), len(rewards))
    return metrics


def _staleness(episodes: Sequence[Trajectory], weights_version: int) -> dict[str, float]:
    """Return the age of the sampled tokens in weight versions: the mean over tokens and the largest."""
    spans = [span for episode in episodes for sequence in episode.sequences for span in sequence.spans]
    ages = [
        (weights_version - span.weights_version, len(span))
        for span in spans
        if span.trained and span.weights_version is not None
    ]
    tokens = sum(length for _, length in ages)
    if not tokens:
        return {}
    mixed = sum(len(set(episode.weights_versions)) > 1 for episode in episodes)
    return {
        "staleness/mean": Mean(sum(age * length for age, length in ages), tokens),
        "staleness/max": float(max(age for age, _ in ages)),
        "staleness/mixed_episodes": float(mixed),
    }


def _describe(episodes: Sequence[Trajectory]) -> dict[str, float]:
    number = len(episodes)
    lengths = [episode.num_sampled_tokens for episode in episodes]
    finished = [episode.num_sampled_tokens for episode in episodes if episode.terminated]
    trained = sum(seq.num_trained_tokens for episode in episodes for seq in episode.sequences)
    context = sum(len(seq) for episode in episodes for seq in episode.sequences)
    calls = [call for episode in episodes for turn in episode.turns for call in turn.tool_calls]
    results = [result for episode in episodes for turn in episode.turns for result in turn.tool_results]
    metrics: dict[str, float] = {
        "episodes": float(number),
        "completions/mean_length": Mean(sum(lengths), number),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": Mean(sum(episode.truncated for episode in episodes), number),
        "completions/mean_terminated_length": Mean(sum(finished), len(finished), otherwise=0.0),
        "turns/mean": Mean(sum(len(episode.turns) for episode in episodes), number),
        "tools/call_frequency": Mean(len(calls), number),
        "tools/failure_frequency": Mean(
            sum(result.is_error for result in results), len(results), otherwise=0.0
        ),
        "tokens/action": float(trained),
        "tokens/context": float(context - trained),
    }
    for episode in episodes:
        key = f"stop/{episode.stop_reason.value}"
        metrics[key] = metrics.get(key, 0.0) + 1.0
    for name in sorted({result.name for result in results}):
        errors = [result.is_error for result in results if result.name == name]
        metrics[f"tool/{name}/error_rate"] = Mean(sum(errors), len(errors))
    return metrics | _named_rewards(episodes)


def _named_rewards(episodes: Sequence[Trajectory]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    named: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.rewards.items():
            if value is not None and isfinite(value):
                named.setdefault(name, []).append(value)
    for name, values in named.items():
        metrics[f"rewards/{name}/mean"] = Mean(sum(values), len(values))
        metrics[f"rewards/{name}/std"] = Spread(values)
    return metrics


class Update(NamedTuple):
    """One optimiser step."""

    loss: float
    norm: float | None
    """Norm of the gradient before clipping; None if it is not known."""
    applied: bool
    """Whether it changed the weights."""
    scores: Sequence[Scores] = ()
    """The scores of the rows that it trained."""


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Return the metrics of a step's updates."""
    number = max(1, len(updates))
    norms = [update.norm for update in updates if update.norm is not None]
    known = {"grad_norm": sum(norms) / max(1, len(norms))} if norms or not updates else {}
    return known | {
        "loss": sum(update.loss for update in updates) / number,
        "updates": float(sum(update.applied for update in updates)),
        "updates/not_finite": float(sum(not isfinite(norm) for norm in norms)),
    }
