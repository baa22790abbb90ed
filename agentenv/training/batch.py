"""Turn trajectory groups into rows to train on, with their advantages, and count what is left out.

An episode has one row (`training.rows`), and several if its history was rewritten. Nothing in this module
depends on how the rows are packed or split later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import isfinite, nan
from typing import Any, NamedTuple, TypeAlias, TypeVar

from agentenv.core.errors import UsageError
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.training.config import GRPOConfig
from agentenv.training.learners.learner import ScoresRows
from agentenv.training.metrics import Mean
from agentenv.training.objective.advantage import (
    group_advantages,
    is_scored,
    overlong_penalty,
    scored,
    standard_deviation,
    turn_advantages,
    turn_returns,
)
from agentenv.training.objective.loss import kl_coefficients, kl_penalty
from agentenv.training.rows import Row, Scores, fit_rows, make_row

__all__ = [
    "Advantage",
    "AdvantageFn",
    "TrainBatch",
    "add_demonstrations",
    "build_batch",
    "episode_kl",
    "once_per_group",
    "own_reward",
]

T = TypeVar("T")

Advantage: TypeAlias = "float | Sequence[Sequence[float]]"
"""Advantage of one episode: one number, or one number for each token of each of its sequences."""

AdvantageFn: TypeAlias = Callable[[Sequence[TrajectoryGroup]], Sequence[Sequence[Advantage]]]
"""Function of the user that returns, for each group, one `Advantage` for each member."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The rows of one batch, with the metrics that were counted while they were made."""

    rows: Sequence[Row] = ()
    counted: Sequence[Row] = ()
    """Rows of groups without spread, which only count in the weights of the others."""
    scores: Sequence[Scores | None] = ()
    """What the last pass of the step's updates found of each of `rows`; empty before the updates."""
    advantages: Sequence[Sequence[Advantage]] = ()
    """Advantages of all members of all groups, including members without a row."""
    mixed: Sequence[bool] = ()
    """Whether each group has spread in the environment's own rewards, before penalties and KL."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])


def build_batch(
    groups: Sequence[TrajectoryGroup],
    config: GRPOConfig,
    *,
    max_length: int | None = None,
    vocab_size: int | None = None,
    advantage_fn: AdvantageFn | None = None,
    kl_in_reward: Sequence[Sequence[float | None]] | None = None,
    gather: Callable[[Sequence[Any]], Sequence[Any]] = list,
) -> TrainBatch:
    """Return the rows to train on.

    These are left out and counted under `dropped/`: failed, untrainable and unscored episodes, truncated ones
    if the options say so, rows longer than the model's context, and the episodes of groups without a
    gradient. The last ones still count in the weights, as GRPO and its relatives were published; DAPO's
    dynamic sampling (`refill_rounds`) replaces them and counts only those that are kept. A group's statistics
    use every usable member, truncated ones included.

    Args:
        groups: trajectory groups from any source; `Trajectory.sequences` hold the tokens.
        config: the run's options.
        max_length: length of the longest sequence that the model accepts.
        vocab_size: size of the model's vocabulary, to detect tokens of another tokenizer.
        advantage_fn: the user's function for advantages, if any.
        kl_in_reward: for each group, its members' KL to the reference, which is subtracted from the rewards.
            None leaves a member out of the group's statistics.
        gather: returns the values of all processes, so that `scale_rewards="batch"` covers all of them.

    Raises:
        UsageError: A token id is outside the vocabulary, an episode was sampled at another temperature than
            the training's, or the user's advantages do not fit.
    """
    advantages, mixed = _advantages_and_spread(groups, config, advantage_fn, kl_in_reward, gather)
    rows: list[Row] = []
    counted: list[Row] = []
    dropped: Counter[str] = Counter()
    episodes = count()
    for index, (group, values) in enumerate(zip(groups, advantages, strict=True)):
        for number, (member, value) in enumerate(zip(group, values, strict=True)):
            reason = _unfit(member, config)
            if reason:
                dropped[reason] += 1
                continue
            made = _rows_of(member, value, _RowOrigin(next(episodes), index, number), config)
            if any(map(_nonzero, values)) or config.loss.trains_zero_std:
                rows += fit_rows(made, max_length, vocab_size, dropped)
                continue
            dropped["zero_std_episodes"] += 1
            if not config.sampling.refill_rounds:
                fit = fit_rows(made, max_length, vocab_size, Counter())
                counted += (replace(row, counted_only=True) for row in fit)
    metrics = {f"dropped/{reason}": float(number) for reason, number in dropped.items()}
    metrics |= _reward_metrics(groups, sum(mixed))
    return TrainBatch(rows, counted, advantages=advantages, mixed=mixed, metrics=metrics)


def _advantages_and_spread(
    groups: Sequence[TrajectoryGroup],
    config: GRPOConfig,
    advantage_fn: AdvantageFn | None,
    kl_in_reward: Sequence[Sequence[float | None]] | None,
    gather: Callable[[Sequence[Any]], Sequence[Any]],
) -> tuple[Sequence[Sequence[Advantage]], list[bool]]:
    """Return the advantages, and which groups have spread in the rewards of the environment itself."""
    if advantage_fn:
        own = _given(groups, advantage_fn)
        return own, _mixed(own)
    advantages = _advantages(groups, _penalised(groups, config, kl_in_reward), config, gather)
    if kl_in_reward is None and not config.loss.overlong_penalty_tokens:
        return advantages, _mixed(advantages)
    mixed = _mixed(_advantages(groups, _rewards(groups), config, gather))
    if config.sampling.refill_rounds:  # DAPO's filter: what penalties alone tell apart teaches length
        told_apart = zip(advantages, mixed, strict=True)
        advantages = [given if spread else [0.0] * len(given) for given, spread in told_apart]
    return advantages, mixed


class _RowOrigin(NamedTuple):
    """Indices of the episode, the group and the member that a row comes from."""

    episode: int
    group: int
    member: int


def _rows_of(
    episode: Trajectory, advantage: Advantage, origin: _RowOrigin, config: GRPOConfig
) -> Iterator[Row | None]:
    """Yield a row for each sequence of an episode; None for a sequence without a trained token."""
    if not isinstance(advantage, (int, float)) and len(advantage) != len(episode.sequences):
        raise UsageError(
            f"{len(advantage)} lists of advantages for an episode of {len(episode.sequences)} sequences"
        )
    attempts = [turn.attempt for turn in episode.turns]
    _require_temperature(episode, config.sampling.temperature)
    for number, sequence in enumerate(episode.sequences):
        own: float | Sequence[float] = advantage if isinstance(advantage, (int, float)) else advantage[number]
        row = make_row(
            sequence,
            own,
            origin.episode,
            origin.group,
            attempts=attempts,
            replay=config.stream.router_replay,
        )
        yield row and replace(row, member=origin.member, sequence=number)


def _require_temperature(episode: Trajectory, temperature: float) -> None:
    """Refuse an episode that was sampled at another temperature than the one the policy is trained at.

    The sampler's log-probabilities belong to the recorded temperature, and the policy's to the training's. A
    ratio of the two would start far from 1 for tokens that nothing has changed yet, and be clipped.
    """
    trained = {span.turn for sequence in episode.sequences for span in sequence.spans if span.trained}
    for turn in episode.turns:
        recorded = turn.sampling.get("temperature", temperature)
        if recorded != temperature and turn.index in trained:
            raise UsageError(
                f"member {episode.member} of group {episode.group_id!r} was sampled at temperature "
                f"{recorded} in turn {turn.index}, and is to be trained at temperature {temperature:g}: "
                "ratios of their log-probabilities mean nothing",
                remedy=f"set temperature={recorded} for this training, or play the episodes at "
                f"{temperature:g}",
            )


def add_demonstrations(
    batch: TrainBatch,
    demonstrations: Sequence[Trajectory],
    max_length: int | None,
    vocab_size: int | None,
    share: float = 1.0,
) -> TrainBatch:
    """Return a batch with the rows of demonstrations, whose sampled tokens are trained by cross entropy.

    Rows that are too long or have no sampled token are left out, and counted under
    `dropped/demonstrations_`.

    Args:
        batch: the batch of episodes.
        demonstrations: trajectories whose model spans the model learns to imitate.
        max_length: length of the longest sequence that the model accepts.
        vocab_size: size of the model's vocabulary, to detect tokens of another tokenizer.
        share: weight of the demonstrations beside the episodes.

    Raises:
        UsageError: A token id is outside the vocabulary.
    """
    dropped: Counter[str] = Counter()
    made = (
        make_row(sequence, 0.0, -1 - episode, -1, demonstration=True)
        for episode, shown in enumerate(demonstrations)
        for sequence in shown.sequences
    )
    fitting = fit_rows(made, max_length, vocab_size, dropped)
    rows = [*batch.rows, *(replace(row, weight=share) for row in fitting)]
    counts = {
        f"dropped/demonstrations_{reason.removeprefix('rows_')}": float(count)
        for reason, count in dropped.items()
    }
    return replace(batch, rows=rows, metrics={**batch.metrics, **counts})


def own_reward(episode: Trajectory) -> float | None:
    """Return the reward of an episode that may be trained; None if it has none."""
    usable = not episode.stop_reason.failed and episode.trainable and is_scored(episode.reward)
    return episode.reward if usable else None


def episode_kl(
    reference: ScoresRows,
    groups: Sequence[TrajectoryGroup],
    config: GRPOConfig,
    *,
    max_length: int | None = None,
    vocab_size: int | None = None,
) -> list[list[float | None]]:
    """Return, for each group, its members' KL to the reference times `beta`, summed over the trained tokens.

    Each token counts with the `beta` of its attempt. The KL is estimated from the sampler's logprobs. It is
    None for members without a reward, and for those whose sequences are all too long for the model.

    Args:
        reference: the reference policy.
        groups: the episodes.
        config: the run's options, which name the estimator and the coefficients.
        max_length: length of the longest sequence that the model accepts.
        vocab_size: size of the model's vocabulary, to detect tokens of another tokenizer.

    Raises:
        UsageError: A token id is outside the vocabulary.
    """
    members = [member for group in groups for member in group]
    totals: list[float | None] = [None] * len(members)
    rows: list[Row] = []
    for index, member in enumerate(members):
        if own_reward(member) is None:
            continue
        attempts = [turn.attempt for turn in member.turns]
        rows_of = (
            make_row(seq, 0.0, index, 0, attempts=attempts, replay=config.stream.router_replay)
            for seq in member.sequences
        )
        made = [row for row in rows_of if row is not None]
        fit = list(fit_rows(made, max_length, vocab_size, Counter()))
        if fit or not made:
            totals[index] = 0.0
        rows += fit
    for row, ref_n in zip(rows, reference.score(rows), strict=True):
        kl_n = kl_penalty(row.sampler_n, ref_n, config.loss.kl_estimator)
        value = float((kl_n * kl_coefficients(row.indices()[1], config.loss)).sum())
        totals[row.episode] = (totals[row.episode] or 0.0) + value
    values = iter(totals)
    return [[next(values) for _ in group] for group in groups]


def _rewards(groups: Sequence[TrajectoryGroup]) -> list[list[float | None]]:
    return [[own_reward(episode) for episode in group] for group in groups]


def _penalised(
    groups: Sequence[TrajectoryGroup],
    config: GRPOConfig,
    kl_in_reward: Sequence[Sequence[float | None]] | None,
) -> list[list[float | None]]:
    kl = kl_in_reward or [[0.0] * len(group) for group in groups]
    pairs = [zip(group, values, strict=True) for group, values in zip(groups, kl, strict=True)]
    return [[_reward(episode, config, own) for episode, own in members] for members in pairs]


def _reward(episode: Trajectory, config: GRPOConfig, kl: float | None) -> float | None:
    reward = own_reward(episode)
    if reward is None or kl is None:
        return None
    if config.loss.overlong_penalty_tokens and config.loss.max_completion_length is not None:
        reward += overlong_penalty(
            episode.num_sampled_tokens,
            max_tokens=config.loss.max_completion_length,
            cache_tokens=config.loss.overlong_penalty_tokens,
        )
    return reward - kl


def _advantages(
    groups: Sequence[TrajectoryGroup],
    rewards: list[list[float | None]],
    config: GRPOConfig,
    gather: Callable[[Sequence[Any]], Sequence[Any]],
) -> Sequence[Sequence[Advantage]]:
    options: dict[str, Any] = {
        "advantage": config.loss.advantage,
        "scale_rewards": config.loss.scale_rewards,
        "gather": gather,
    }
    discount = config.loss.turn_discount
    if discount is None:
        return group_advantages(rewards, **options)
    returns = [
        [
            None if reward is None else turn_returns(_turn_rewards(episode, reward), discount=discount)
            for episode, reward in zip(group, known, strict=True)
        ]
        for group, known in zip(groups, rewards, strict=True)
    ]
    return _by_turn(groups, turn_advantages(returns, **options))


def _by_turn(
    groups: Sequence[TrajectoryGroup], advantages: Sequence[Sequence[Sequence[float]]]
) -> list[list[list[list[float]]]]:
    """Return the advantages of all tokens from those of the turns."""
    return [
        [_spread(episode, values) for episode, values in zip(group, members, strict=True)]
        for group, members in zip(groups, advantages, strict=True)
    ]


def _turn_rewards(episode: Trajectory, reward: float) -> list[float]:
    """Return the rewards of the turns; penalties on the episode's reward are added to the last turn."""
    rewards = list(episode.turn_rewards)
    if rewards:
        rewards[-1] += reward - (episode.reward or 0.0)
    return rewards


def _spread(episode: Trajectory, values: Sequence[float]) -> list[list[float]]:
    """Return, for every token of every sequence, the advantage of its turn."""
    held = values or [0.0] * len(episode.turns)
    return [[held[turn] if turn >= 0 else 0.0 for turn in seq.turn_index] for seq in episode.sequences]


def _given(groups: Sequence[TrajectoryGroup], advantage_fn: AdvantageFn) -> list[list[Advantage]]:
    """Return the user's own advantages as plain numbers, after a check of their shape."""
    given = advantage_fn(groups)
    if [len(group) for group in groups] != [len(values) for values in given]:
        raise UsageError("the advantage function must return one advantage for each member of each group")
    return [
        [_plain(value, episode) for value, episode in zip(values, group, strict=True)]
        for values, group in zip(given, groups, strict=True)
    ]


def _plain(value: Any, episode: Trajectory) -> Advantage:
    """Return an advantage as Python numbers, because users may return values of NumPy or torch."""
    try:
        number: float | None = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    try:
        plain = [[float(entry) for entry in row] for row in value] if number is None else [[number]]
    except (TypeError, ValueError):
        plain = [[nan]]
    if not all(isfinite(entry) for row in plain for entry in row):
        raise UsageError(
            f"the advantage of member {episode.member} of group {episode.group_id!r} must be a finite "
            f"number, or for each of its sequences one for each token, not {value!r}"
        )
    return plain if number is None else number


def _mixed(advantages: Sequence[Sequence[Advantage]]) -> list[bool]:
    """Return, for each group, whether any of its advantages is not 0."""
    return [any(map(_nonzero, values)) for values in advantages]


def _nonzero(value: Advantage) -> bool:
    if isinstance(value, (int, float)):
        return value != 0
    return any(number != 0 for sequence in value for number in sequence)


def _unfit(episode: Trajectory, config: GRPOConfig) -> str:
    """Return the name of the metric that counts why an episode is left out; empty if it is trained."""
    if episode.stop_reason.failed:
        return "failed_episodes"
    if not episode.trainable or not episode.sequences:
        return "untrainable_episodes"
    if episode.reward is None or not is_scored(episode.reward):
        return "unscored_episodes"
    return "truncated_episodes" if config.loss.mask_truncated_completions and episode.truncated else ""


def _reward_metrics(groups: Sequence[TrajectoryGroup], mixed: int) -> dict[str, float]:
    """Return metrics of the rewards without penalties; `mixed` is the number of groups with spread."""
    known = [scored(group) for group in _rewards(groups)]
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


def once_per_group(
    held: dict[int, tuple[TrajectoryGroup, T]],
    groups: Sequence[TrajectoryGroup],
    function: Callable[[Sequence[TrajectoryGroup]], Sequence[T]],
    total: Callable[[float], float],
) -> list[T]:
    """Return a value for each group, and call the function for the groups that have none yet.

    Each refill of a batch and the step itself ask for them. All processes call the function if one of them
    has such groups, because it may communicate.

    Args:
        held: the values so far, by the id of the group. An entry holds its group, so that the id belongs to
            no other object.
        groups: the groups.
        function: computes the values of groups.
        total: sums a number over all processes.

    Raises:
        UsageError: The function did not return one value for each group.
    """
    new = [group for group in groups if id(group) not in held]
    if total(len(new)):
        values = function(new)
        if len(values) != len(new):
            raise UsageError(
                f"the advantage function returned {len(values)} lists for {len(new)} groups: it must "
                "return one advantage for each member of each group"
            )
        held |= {id(group): (group, value) for group, value in zip(new, values, strict=True)}
    return [held[id(group)][1] for group in groups]
