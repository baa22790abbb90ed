"""Metrics of a step: sums over micro-batches and processes become means over the global batch.

Names are TRL's where TRL has one, so that dashboards carry over; ours stand beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.train.model.optim import applies
from agentenv.train.objective.advantage import standard_deviation

__all__ = ["EXTREMES", "JsonLines", "Mean", "Meter", "Spread", "episode_metrics", "update_metrics"]

EXTREMES: dict[str, Callable[[Iterable[float]], float]] = {
    "max": max,
    "max_length": max,
    "abs_max": max,
    "high_max": max,
    "min_length": min,
    "low_min": min,
}
"""What is kept of the metrics whose names end in one of these: the largest or the smallest value."""


class Mean(float):
    """A mean that keeps its sum and count, so that the parts of several processes have an exact one."""

    __slots__ = ("count", "otherwise", "total")

    def __new__(cls, total: float, count: float, otherwise: float = nan) -> Self:
        """Return `total / count`; `otherwise` where nothing was counted."""
        mean = super().__new__(cls, total / count if count else otherwise)
        mean.total, mean.count, mean.otherwise = total, count, otherwise
        return mean

    def __getnewargs__(self) -> tuple[float, float, float]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.total, self.count, self.otherwise

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Return the mean over everything that was counted for the parts."""
        return cls(
            sum(one.total for one in parts), sum(one.count for one in parts), otherwise=parts[0].otherwise
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
        return cls([value for one in parts for value in one.values])


class Meter:
    """Adds up sums and keeps extremes of micro-batches; the tensors are read once, at the end."""

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
        """Remember the largest and smallest values, as `EXTREMES` has it."""
        for name, value in extremes.items():
            self._extremes.setdefault(name, []).append(value)

    def result(self) -> dict[str, float]:
        """Return means, each a `Mean`, and extremes."""
        means: dict[str, float] = {
            name: Mean(sum(map(float, values)), self._counts[name])
            for name, values in self._sums.items()
            if self._counts[name]
        }
        picked = ((name, EXTREMES[name.rpartition("/")[2]], of) for name, of in self._extremes.items())
        return means | {name: pick(map(float, values)) for name, pick, values in picked}


def episode_metrics(
    groups: Sequence[TrajectoryGroup],
    *,
    weights_version: int = 0,
    gather: Callable[[Sequence[Any]], Sequence[Any]] = list,
) -> dict[str, float]:
    """Return what the episodes of a batch were like, over all and per environment.

    Means are `Mean`s and deviations `Spread`s, to be merged by `World.merge`.

    Args:
        groups: the episodes.
        weights_version: of the trainer before the step, from which their age is counted.
        gather: returns the values of all processes; other ones may have played other environments.
    """
    episodes = [one for group in groups for one in group]
    environments = sorted({one.env_id for one in episodes})
    several = len(set(gather(environments))) > 1
    if not episodes:
        return {"episodes": 0.0}
    metrics = _describe(episodes) | _staleness(episodes, weights_version)
    for env_id in environments if several else ():
        own = [one for one in episodes if one.env_id == env_id]
        metrics |= {f"{env_id}/{name}": value for name, value in _describe(own).items()}
        rewards = [one.reward for one in own if one.reward is not None]
        if rewards:
            metrics[f"{env_id}/reward"] = Mean(sum(rewards), len(rewards))
    return metrics


def _staleness(episodes: Sequence[Trajectory], weights_version: int) -> dict[str, float]:
    """Return how many versions old the sampled tokens are: the mean over tokens, and the oldest."""
    spans = [span for one in episodes for sequence in one.sequences for span in sequence.spans]
    ages = [
        (weights_version - span.weights_version, len(span))
        for span in spans
        if span.trained and span.weights_version is not None
    ]
    tokens = sum(length for _, length in ages)
    if not tokens:
        return {}
    mixed = sum(len(set(one.weights_versions)) > 1 for one in episodes)
    return {
        "staleness/mean": Mean(sum(age * length for age, length in ages), tokens),
        "staleness/max": float(max(age for age, _ in ages)),
        "staleness/mixed_episodes": float(mixed),
    }


def _describe(episodes: Sequence[Trajectory]) -> dict[str, float]:
    number = len(episodes)
    lengths = [one.num_sampled_tokens for one in episodes]
    finished = [one.num_sampled_tokens for one in episodes if one.terminated]
    trained = sum(seq.num_trained_tokens for one in episodes for seq in one.sequences)
    context = sum(len(seq) for one in episodes for seq in one.sequences)
    calls = [call for one in episodes for turn in one.turns for call in turn.tool_calls]
    results = [result for one in episodes for turn in one.turns for result in turn.tool_results]
    metrics: dict[str, float] = {
        "episodes": float(number),
        "completions/mean_length": Mean(sum(lengths), number),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": Mean(sum(one.truncated for one in episodes), number),
        "completions/mean_terminated_length": Mean(sum(finished), len(finished), otherwise=0.0),
        "turns/mean": Mean(sum(len(one.turns) for one in episodes), number),
        "tools/call_frequency": Mean(len(calls), number),
        "tools/failure_frequency": Mean(sum(one.is_error for one in results), len(results), otherwise=0.0),
        "tokens/action": float(trained),
        "tokens/context": float(context - trained),
    }
    for one in episodes:
        key = f"stop/{one.stop_reason.value}"
        metrics[key] = metrics.get(key, 0.0) + 1.0
    for name in sorted({one.name for one in results}):
        errors = [one.is_error for one in results if one.name == name]
        metrics[f"tool/{name}/error_rate"] = Mean(sum(errors), len(errors))
    return metrics | _named_rewards(episodes)


def _named_rewards(episodes: Sequence[Trajectory]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    named: dict[str, list[float]] = {}
    for one in episodes:
        for name, value in one.rewards.items():
            if value is not None and isfinite(value):
                named.setdefault(name, []).append(value)
    for name, values in named.items():
        metrics[f"rewards/{name}/mean"] = Mean(sum(values), len(values))
        metrics[f"rewards/{name}/std"] = Spread(values)
    return metrics


def update_metrics(updates: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return what a step's updates were like, each given as its loss and its gradient norm."""
    number = max(1, len(updates))
    return {
        "loss": sum(loss for loss, _ in updates) / number,
        "grad_norm": sum(norm for _, norm in updates) / number,
        "updates": float(sum(applies(norm) for _, norm in updates)),
        "updates/not_finite": float(sum(not isfinite(norm) for _, norm in updates)),
    }


class JsonLines:
    """A file with one JSON line for each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Append what a step has to say."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps above this one, so that a resumed run has each step once."""
        if not self.path.exists():
            return
        kept: list[str] = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):
                continue
        self.path.write_text("".join(kept), encoding="utf-8")
