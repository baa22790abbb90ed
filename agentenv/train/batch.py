"""From trajectory groups to rows: what may be trained, with advantages, counted on the way.

A row is one token sequence, cut after its last trained token; an episode with a rewritten history has
several. Nothing here depends on how rows will be packed or split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import isfinite, nan
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from agentenv.core.errors import UsageError
from agentenv.core.trajectory import TokenSequence, Trajectory, TrajectoryGroup
from agentenv.train.config import GRPOConfig
from agentenv.train.objective.advantage import (
    group_advantages,
    is_scored,
    overlong_penalty,
    scored,
    standard_deviation,
    turn_advantages,
    turn_returns,
)
from agentenv.train.sums import Mean

__all__ = ["AdvantageFn", "Row", "TrainBatch", "add_demonstrations", "build_batch"]

Advantage: TypeAlias = "float | Sequence[Sequence[float]]"
"""Of one episode: a number, or one number for each token of each of its sequences."""

AdvantageFn: TypeAlias = Callable[[Sequence[TrajectoryGroup]], Sequence[Sequence[Advantage]]]
"""The user's own advantages: for each group, one `Advantage` for each member."""


@dataclass(slots=True)
class Row:
    """One sequence to train on; the tensors `_n` hold its n trained tokens only."""

    token_ids: list[int]
    """Up to and with the last trained token."""
    positions_n: Tensor
    """Indices of the trained tokens in `token_ids`; never 0, for nothing predicts the first token."""
    sampler_n: Tensor
    """The sampler's logprobs. Numbers are float64 here and take the model's format on its device."""
    advantages_n: Tensor
    episode: int
    group: int
    weight: float = 0.0
    """Weight of each of its tokens, set for each optimiser step."""
    old_n: Tensor | None = None
    ref_n: Tensor | None = None
    demonstration: bool = False
    """Trained by cross entropy instead of the policy loss."""
    member: int = 0
    """Place of the episode in its group."""
    sequence: int = 0
    """Place of the sequence in its episode."""
    new_n: Tensor | None = None
    """Log-probabilities under the weights of the latest pass of the update."""
    entropy_n: Tensor | None = None

    @property
    def num_trained(self) -> int:
        """Trained tokens."""
        return self.positions_n.numel()


@dataclass(slots=True)
class TrainBatch:
    """The rows of one batch and what was counted while they were made."""

    rows: list[Row]
    advantages: Sequence[Sequence[Advantage]] = ()
    """Of every member of every group, also of those that gave no row."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    warnings: list[str] = field(default_factory=list[str])


def build_batch(
    groups: Sequence[TrajectoryGroup],
    config: GRPOConfig,
    *,
    weights_version: int | None = None,
    max_length: int | None = None,
    vocab_size: int | None = None,
    advantage_fn: AdvantageFn | None = None,
    kl_in_reward: Callable[[Trajectory], float] | None = None,
    gather: Callable[[Sequence[Any]], Sequence[Any]] = list,
) -> TrainBatch:
    """Return the rows to train on.

    Left out, and counted under `dropped/`: failed and untrainable episodes, those without a finite
    reward, too stale ones, truncated ones if asked, rows longer than the model takes, and what else
    is in groups without any advantage. A group's statistics use every usable member, the truncated
    included.

    Args:
        groups: from any source; `Trajectory.sequences` hold the tokens.
        config: the run's options.
        weights_version: the trainer's weights now, for staleness.
        max_length: longest sequence that the model takes.
        vocab_size: to notice tokens of another tokenizer.
        advantage_fn: the user's own advantages.
        kl_in_reward: KL to the reference of an episode, taken off its reward.
        gather: returns the values of all processes, for a spread that is the whole batch's.

    Raises:
        UsageError: A token id is outside the vocabulary, or the user's advantages do not fit.
    """
    rewards = [[_reward(one, config, kl_in_reward) for one in group] for group in groups]
    advantages = (
        _given(groups, advantage_fn) if advantage_fn else _advantages(groups, rewards, config, gather)
    )
    mixed = [any(map(_nonzero, values)) for values in advantages]
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    episodes = count()
    for index, (group, values) in enumerate(zip(groups, advantages, strict=True)):
        for place, (member, value) in enumerate(zip(group, values, strict=True)):
            reason = _unfit(member, config, weights_version)
            if not reason and config.drop_zero_std and not mixed[index]:
                reason = "zero_std_episodes"
            if reason:
                dropped[reason] += 1
                continue
            for row in _rows_of(member, value, _Place(next(episodes), index, place)):
                reason = _unfit_row(row, max_length, vocab_size)
                if row is None or reason:
                    dropped[reason] += 1
                else:
                    rows.append(row)
    metrics = {f"dropped/{reason}": float(number) for reason, number in dropped.items()}
    return TrainBatch(rows, advantages, metrics | _reward_metrics(groups, sum(mixed)))


class _Place(NamedTuple):
    """Where a row comes from."""

    episode: int
    group: int
    member: int


def _rows_of(one: Trajectory, advantage: Advantage, place: _Place) -> Iterator[Row | None]:
    """Yield a row of each sequence of an episode; None where nothing can be trained."""
    if not isinstance(advantage, (int, float)) and len(advantage) != len(one.sequences):
        raise UsageError(
            f"{len(advantage)} lists of advantages for an episode of {len(one.sequences)} sequences"
        )
    for number, sequence in enumerate(one.sequences):
        own: float | Sequence[float] = advantage if isinstance(advantage, (int, float)) else advantage[number]
        row = make_row(sequence, own, place.episode, place.group)
        if row is not None:
            row.member, row.sequence = place.member, number
        yield row


def make_row(
    sequence: TokenSequence,
    advantage: float | Sequence[float],
    episode: int,
    group: int,
    *,
    demonstration: bool = False,
) -> Row | None:
    """Return a row of a sequence; None if nothing in it can be trained."""
    mask = torch.tensor(sequence.loss_mask, dtype=torch.bool)
    mask[:1] = False  # the first token has no prediction
    positions_n = mask.nonzero().squeeze(-1)
    if positions_n.numel() == 0:
        return None
    if isinstance(advantage, (int, float)):
        advantages_n = torch.full(positions_n.shape, float(advantage), dtype=torch.float64)
    else:
        if len(advantage) != len(sequence):
            raise UsageError(
                f"{len(advantage)} per-token advantages for a sequence of {len(sequence)} tokens"
            )
        advantages_n = torch.tensor(advantage, dtype=torch.float64)[positions_n]
    sampler_n = torch.tensor(sequence.logprobs, dtype=torch.float64)[positions_n]
    token_ids = sequence.token_ids[: int(positions_n[-1]) + 1]
    return Row(token_ids, positions_n, sampler_n, advantages_n, episode, group, demonstration=demonstration)


def add_demonstrations(
    batch: TrainBatch, demonstrations: Sequence[Trajectory], max_length: int | None, vocab_size: int | None
) -> None:
    """Add the rows of demonstrations: what a scripted policy said is trained by cross entropy.

    Rows that are too long or without a sampled token are left out, and counted under
    `dropped/demonstrations_`.

    Args:
        batch: gets the rows and the counts.
        demonstrations: whose model spans are to be imitated.
        max_length: longest sequence that the model takes.
        vocab_size: to notice tokens of another tokenizer.

    Raises:
        UsageError: A token id is outside the vocabulary.
    """
    dropped: Counter[str] = Counter()
    for episode, one in enumerate(demonstrations):
        for sequence in one.sequences:
            row = make_row(sequence, 0.0, -1 - episode, -1, demonstration=True)
            reason = _unfit_row(row, max_length, vocab_size)
            if row is None or reason:
                dropped[reason.removeprefix("rows_")] += 1
            else:
                batch.rows.append(row)
    batch.metrics |= {f"dropped/demonstrations_{reason}": float(count) for reason, count in dropped.items()}


def _own_reward(one: Trajectory) -> float | None:
    usable = not one.stop_reason.failed and one.trainable and is_scored(one.reward)
    return one.reward if usable else None


def _reward(
    one: Trajectory, config: GRPOConfig, kl_in_reward: Callable[[Trajectory], float] | None
) -> float | None:
    reward = _own_reward(one)
    if reward is None:
        return None
    if config.overlong_penalty_tokens and config.max_completion_length is not None:
        reward += overlong_penalty(
            one.num_sampled_tokens,
            max_tokens=config.max_completion_length,
            cache_tokens=config.overlong_penalty_tokens,
        )
    if kl_in_reward is not None:
        reward -= config.beta * kl_in_reward(one)
    return reward


def _advantages(
    groups: Sequence[TrajectoryGroup],
    rewards: list[list[float | None]],
    config: GRPOConfig,
    gather: Callable[[Sequence[Any]], Sequence[Any]],
) -> Sequence[Sequence[Advantage]]:
    options: dict[str, Any] = {
        "advantage": config.advantage,
        "scale_rewards": config.scale_rewards,
        "eps": config.advantage_eps,
        "gather": gather,
    }
    if config.advantage_level == "episode":
        return group_advantages(rewards, **options)
    returns = [
        [
            None
            if reward is None
            else turn_returns(_turn_rewards(one, reward), discount=config.turn_discount)
            for one, reward in zip(group, known, strict=True)
        ]
        for group, known in zip(groups, rewards, strict=True)
    ]
    return [
        [_spread(one, values) for one, values in zip(group, members, strict=True)]
        for group, members in zip(groups, turn_advantages(returns, **options), strict=True)
    ]


def _turn_rewards(one: Trajectory, reward: float) -> list[float]:
    """Return the rewards of the turns; what was added to the episode's own reward is the last one's."""
    own = list(one.turn_rewards)
    if own:
        own[-1] += reward - (one.reward or 0.0)
    return own


def _spread(one: Trajectory, values: Sequence[float]) -> list[list[float]]:
    """Give every token the advantage of its turn."""
    held = values or [0.0] * len(one.turns)
    return [[held[turn] if turn >= 0 else 0.0 for turn in seq.turn_index] for seq in one.sequences]


def _given(groups: Sequence[TrajectoryGroup], advantage_fn: AdvantageFn) -> list[list[Advantage]]:
    """Return the user's own advantages as plain numbers, once it is clear that they are some."""
    given = advantage_fn(groups)
    if [len(group) for group in groups] != [len(values) for values in given]:
        raise UsageError("the advantage function must return one advantage for each member of each group")
    return [
        [_plain(value, one) for value, one in zip(values, group, strict=True)]
        for values, group in zip(given, groups, strict=True)
    ]


def _plain(value: Any, one: Trajectory) -> Advantage:
    """Return an advantage as numbers of Python: users compute them with NumPy and torch too."""
    try:
        number: float | None = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    try:
        plain = [[float(each) for each in row] for row in value] if number is None else [[number]]
    except (TypeError, ValueError):
        plain = [[nan]]
    if not all(isfinite(each) for row in plain for each in row):
        raise UsageError(
            f"the advantage of member {one.member} of group {one.group_id!r} must be a finite number, or "
            f"for each of its sequences one for each token, not {value!r}"
        )
    return plain if number is None else number


def _nonzero(value: Advantage) -> bool:
    if isinstance(value, (int, float)):
        return value != 0
    return any(number != 0 for sequence in value for number in sequence)


def _unfit(one: Trajectory, config: GRPOConfig, weights_version: int | None) -> str:
    """Return why an episode is left out, as a metric's name; empty if it is trained."""
    if one.stop_reason.failed:
        return "failed_episodes"
    if not one.trainable or not one.sequences:
        return "untrainable_episodes"
    if one.reward is None or not is_scored(one.reward):
        return "unscored_episodes"
    if config.mask_truncated_completions and one.truncated:
        return "truncated_episodes"
    if config.max_staleness is None or weights_version is None or not one.weights_versions:
        return ""
    return "stale_episodes" if weights_version - min(one.weights_versions) > config.max_staleness else ""


def _unfit_row(row: Row | None, max_length: int | None, vocab_size: int | None) -> str:
    """Return why a sequence is left out, as a metric's name; empty if it is trained."""
    if row is None:
        return "rows_without_trained_tokens"
    if max_length is not None and len(row.token_ids) > max_length:
        return "rows_too_long"
    if vocab_size is not None and max(row.token_ids) >= vocab_size:
        raise UsageError(
            f"token id {max(row.token_ids)} is outside the model's vocabulary of {vocab_size}: "
            "the trajectories were made with another tokenizer"
        )
    return ""


def _reward_metrics(groups: Sequence[TrajectoryGroup], mixed: int) -> dict[str, float]:
    """Return what the episodes' own rewards are like, without penalties; `mixed` groups have a gradient."""
    known = [scored([_own_reward(one) for one in group]) for group in groups]
    flat = [reward for group in known for reward in group]
    stds = [standard_deviation(group) if max(group) > min(group) else 0.0 for group in known if group]
    number = len(groups)
    return {
        "reward": Mean(sum(flat), len(flat)),
        "reward_std": Mean(sum(stds), len(stds)),
        "frac_reward_zero_std": Mean(stds.count(0.0), len(stds), otherwise=1.0),
        "groups/frac_mixed": Mean(mixed, number, otherwise=0.0),
        "groups/frac_all_good": Mean(sum(1 for g in known if g and min(g) >= 1.0), number, otherwise=0.0),
        "groups/frac_all_bad": Mean(sum(1 for g in known if g and max(g) <= 0.0), number, otherwise=0.0),
    }
