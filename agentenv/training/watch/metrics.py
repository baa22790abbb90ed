"""Metrics of a step, which are merged into means over the global batch.

Metrics that TRL has too use TRL's names, so that dashboards made for TRL work here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.training.sums import Mean, Spread, applies

__all__ = ["JsonLines", "episode_metrics", "update_metrics"]


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
    episodes = [one for group in groups for one in group]
    environments = sorted({one.env_id for one in episodes})
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
    """Return the metrics of a step's updates, each of which is a pair of its loss and its gradient norm."""
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
        """Append the line of one step."""
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
        # Replaced as a whole, because a kill in the middle of writing would lose the metrics of the run.
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(self.path)
