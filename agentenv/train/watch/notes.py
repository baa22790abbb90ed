"""What a step made of each episode: its advantage, and entropy and new log-probability of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from torch import Tensor

from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.train.batch import Advantage, Row, TrainBatch

__all__ = ["episode_notes"]


def episode_notes(
    groups: Sequence[TrajectoryGroup], batch: TrainBatch
) -> Iterator[tuple[Trajectory, dict[str, object]]]:
    """Yield each episode of a batch with a note on it, after the update.

    A note has `advantage` (None if the episode could not be scored), and where the episode was trained
    `entropy` and `new_logprobs`, both from the last pass of the update: one number for each token of its
    sequences, one sequence after the other, and 0.0 where nothing was trained. With advantages that differ
    within the episode, `advantages` has them for each token.
    """
    rows: dict[tuple[int, int], list[Row]] = {}
    for row in batch.rows:
        rows.setdefault((row.group, row.member), []).append(row)
    for index, (group, values) in enumerate(zip(groups, batch.advantages, strict=True)):
        for member, (one, value) in enumerate(zip(group, values, strict=True)):
            yield one, _advantage(one, value) | _tokens(one, rows.get((index, member), []))


def _advantage(one: Trajectory, value: Advantage) -> dict[str, object]:
    if one.reward is None or not one.trainable:
        return {"advantage": None}
    if isinstance(value, (int, float)):
        return {"advantage": float(value)}
    flat = [number for sequence in value for number in sequence]
    mask = [trained for sequence in one.sequences for trained in sequence.loss_mask]
    own = [number for number, trained in zip(flat, mask, strict=True) if trained]
    return {"advantage": sum(own) / max(1, len(own)), "advantages": _short(flat)}


def _tokens(one: Trajectory, rows: Sequence[Row]) -> dict[str, object]:
    ends = [0, *accumulate(map(len, one.sequences))]
    entropy, new = [0.0] * ends[-1], [0.0] * ends[-1]
    for row in rows:
        if row.new_n is None or row.entropy_n is None:
            return {}
        places = [ends[row.sequence] + place for place in row.positions_n.tolist()]
        for found, values_n in ((entropy, row.entropy_n), (new, row.new_n)):
            for place, number in zip(places, _numbers(values_n), strict=True):
                found[place] = number
    return {"entropy": entropy, "new_logprobs": new} if rows else {}


def _numbers(values_n: Tensor) -> list[float]:
    return _short(values_n.float().tolist())


def _short(values: Sequence[float]) -> list[float]:
    """Return the values to four digits: they are colours, and a run has many."""
    return [round(value, 4) for value in values]
