"""Advantages: how much better an episode is than its group.

The tests check these rules:

1. A missing or non-finite reward is left out of every statistic and gets advantage 0.
2. All members of a group without spread, or with fewer than two scored members, get exactly 0.
3. The standard deviation is the unbiased one; `eps` is added to it, never to the variance.
4. The baseline of a turn is computed from other members only, so it adds no bias, however many turns the
   policy takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, sqrt
from typing import Literal

from agentenv.core.errors import UsageError

__all__ = ["group_advantages", "overlong_penalty", "turn_advantages", "turn_returns"]

NO_SPREAD = 1e-8
"""Rewards that differ by at most this are treated as equal."""


def group_advantages(
    rewards: Sequence[Sequence[float | None]],
    *,
    advantage: Literal["grpo", "rloo"] = "grpo",
    scale_rewards: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
    gather: Callable[[Sequence[float]], Sequence[float]] = list,
) -> list[list[float]]:
    """Return the advantage of each member of each group.

    With m and s the mean and unbiased standard deviation of the group's n scored rewards R:

    - `grpo`, `group`: (R - m) / (s + eps) (DeepSeekMath's GRPO; eps as in TRL);
    - `grpo`, `none`: R - m (Dr.GRPO; tinker-cookbook);
    - `grpo`, `batch`: (R - m) / (s over the whole batch + eps) (TRL, `scale_rewards="batch"`);
    - `rloo`: R - mean of the others = (R - m) * n / (n - 1) (leave-one-out; verl, SkyRL), then scaled.

    Args:
        rewards: for each group, its members' rewards; None or NaN for a missing reward.
        advantage: the baseline.
        scale_rewards: the standard deviation that the difference is divided by, or "none".
        eps: number added to the standard deviation.
        gather: takes this process's scored rewards and returns those of all processes (`World.gather`).
            Every process calls it, but only for `batch`; a process without groups calls it too.

    Raises:
        UsageError: An option is unknown.
    """
    if advantage not in ("grpo", "rloo") or scale_rewards not in ("group", "batch", "none"):
        raise UsageError(f"unknown advantage {advantage!r} or scale_rewards {scale_rewards!r}")
    batch_std = 0.0
    if scale_rewards == "batch":
        batch_std = standard_deviation(gather([reward for group in rewards for reward in scored(group)]))
    result: list[list[float]] = []
    for group in rewards:
        known = scored(group)
        if len(known) < 2 or max(known) - min(known) <= NO_SPREAD:
            result.append([0.0] * len(group))
            continue
        mean = sum(known) / len(known)
        factor = len(known) / (len(known) - 1) if advantage == "rloo" else 1.0
        if scale_rewards != "none":
            factor /= (standard_deviation(known) if scale_rewards == "group" else batch_std) + eps
        result.append(
            [(reward - mean) * factor if reward is not None and isfinite(reward) else 0.0 for reward in group]
        )
    return result


def turn_advantages(
    returns: Sequence[Sequence[Sequence[float] | None]],
    *,
    advantage: Literal["grpo", "rloo"] = "grpo",
    scale_rewards: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
    gather: Callable[[Sequence[Sequence[float]]], Sequence[Sequence[float]]] = list,
) -> list[list[list[float]]]:
    """Return the advantage of each turn of each member of each group.

    With G_k the return-to-go of turn k, and n the number of scored members, the advantage is

    - `rloo`: A_k = G_k - b_k;
    - `grpo`: A_k = (G_k - b_k) * (n - 1) / n;

    then scaled. The baseline b_k is computed from the other members, so no action of a member changes its own
    baselines. It is the mean of G_k over the other members that have a turn k. What the baseline of the turn
    before still expected after that turn's reward counts as one more member: A_k = (c (G_k - mean) +
    A_(k-1)) / (c + 1), with c such members. Late turns have few others, and this keeps them from noise.

    A mean over all turns of the group would depend on the number of turns, which the policy itself chooses
    (verl#7244). The scale is the unbiased standard deviation over episodes, where an episode's squared
    deviation is the mean over its turns. If every episode has one turn, the result equals that of
    `group_advantages`.

    Args:
        returns: for each group, each member's returns-to-go; None or empty for a missing reward.
        advantage: the factor of the difference; see above.
        scale_rewards: the standard deviation that the difference is divided by, or "none".
        eps: number added to the standard deviation.
        gather: as in `group_advantages`, but for the members' returns.
    """
    known = [[own for own in group if own] for group in returns]
    batch_std = 0.0
    if scale_rewards == "batch":
        everyone = gather([own for group in known for own in group])
        batch_std = _turn_deviation(_differences(everyone))
    result: list[list[list[float]]] = []
    for group, members in zip(returns, known, strict=True):
        if not any(max(values) - min(values) > NO_SPREAD for values in _by_turn(members)):
            result.append([[0.0] * len(own or ()) for own in group])
            continue
        differences = _differences(members)
        factor = len(members) / (len(members) - 1) if advantage == "rloo" else 1.0
        if scale_rewards != "none":
            factor /= (_turn_deviation(differences) if scale_rewards == "group" else batch_std) + eps
        scaled = iter([[value * factor for value in own] for own in differences])
        result.append([next(scaled) if own else [] for own in group])
    return result


def _by_turn(members: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return, for each turn, the returns-to-go of the members that have it."""
    longest = max(map(len, members), default=0)
    return [[own[turn] for own in members if turn < len(own)] for turn in range(longest)]


def _differences(members: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return (G_k - b_k) * (n - 1) / n of each turn of each of n members."""
    count = len(members)
    if count < 2:
        return [[0.0] * len(own) for own in members]
    totals = [(sum(values), len(values)) for values in _by_turn(members)]
    result: list[list[float]] = []
    for own in members:
        differences: list[float] = []
        for turn, value in enumerate(own):
            total, present = totals[turn]
            # The sum of the differences to the other members; the turn before counts as one more of them.
            before = differences[-1:]
            differences.append((value * present - total + sum(before)) / (present - 1 + len(before)))
        result.append([difference * (count - 1) / count for difference in differences])
    return result


def _turn_deviation(differences: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation over members, each with the mean square of its turns' differences."""
    if len(differences) < 2:
        return 0.0
    squares = [sum(value**2 for value in own) / len(own) for own in differences]
    return sqrt(sum(squares) / (len(differences) - 1))


def is_scored(reward: float | None) -> bool:
    """Return whether a reward exists and is finite."""
    return reward is not None and isfinite(reward)


def scored(rewards: Sequence[float | None]) -> list[float]:
    """Return the rewards that exist and are finite."""
    return [reward for reward in rewards if reward is not None and isfinite(reward)]


def standard_deviation(values: Sequence[float]) -> float:
    """Return the unbiased standard deviation; 0.0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def turn_returns(turn_rewards: Sequence[float], *, discount: float = 1.0) -> list[float]:
    """Return the return-to-go of each turn: `G_k = r_k + discount * G_(k+1)`."""
    returns: list[float] = []
    total = 0.0
    for reward in reversed(turn_rewards):
        total = reward + discount * total
        returns.append(total)
    return returns[::-1]


def overlong_penalty(num_tokens: int, *, max_tokens: int, cache_tokens: int) -> float:
    """Return DAPO's soft overlong penalty (TRL, trl/rewards/other_rewards.py).

    The penalty is 0 up to `max_tokens - cache_tokens`, falls linearly to -1 at `max_tokens`, and stays -1.
    """
    if cache_tokens <= 0 or num_tokens <= max_tokens - cache_tokens:
        return 0.0
    return max(-1.0, (max_tokens - cache_tokens - num_tokens) / cache_tokens)
