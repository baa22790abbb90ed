"""Notes on each episode of a step: its advantage, and its tokens' entropy and new log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from torch import Tensor

from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.training.batch import Advantage, TrainBatch
from agentenv.training.rows import Row, Scores

__all__ = ["episode_notes"]


def episode_notes(
    groups: Sequence[TrajectoryGroup], batch: TrainBatch
) -> Iterator[tuple[Trajectory, dict[str, object]]]:
    """Yield each episode of a batch with its note, after the update.

    A note has `advantage`, which is None if the episode has no reward or cannot be trained. If the episode
    was trained, its note also has `entropy` and `new_logprobs` from the last pass of the update. These lists
    have one number for each token of its sequences, one sequence after the other, and 0.0 for tokens that
    were not trained. If advantages differ within the episode, `advantages` has one number for each token.
    """
    rows: dict[tuple[int, int], list[tuple[Row, Scores | None]]] = {}
    for row, scores in zip(batch.rows, batch.scores, strict=True):
        rows.setdefault((row.group, row.member), []).append((row, scores))
    for index, (group, values) in enumerate(zip(groups, batch.advantages, strict=True)):
        for member, (episode, value) in enumerate(zip(group, values, strict=True)):
            yield episode, _advantage(episode, value) | _tokens(episode, rows.get((index, member), []))


def _advantage(episode: Trajectory, value: Advantage) -> dict[str, object]:
    if episode.reward is None or not episode.trainable:
        return {"advantage": None}
    if isinstance(value, (int, float)):
        return {"advantage": float(value)}
    flat = [number for sequence in value for number in sequence]
    mask = [trained for sequence in episode.sequences for trained in sequence.loss_mask]
    kept = [number for number, trained in zip(flat, mask, strict=True) if trained]
    return {"advantage": sum(kept) / max(1, len(kept)), "advantages": _short(flat)}


def _tokens(episode: Trajectory, rows: Sequence[tuple[Row, Scores | None]]) -> dict[str, object]:
    ends = [0, *accumulate(map(len, episode.sequences))]
    spread: dict[str, object] = {}
    for name, field in (("entropy", "entropy_n"), ("new_logprobs", "logprobs_n")):
        values = [0.0] * ends[-1]
        for row, scores in rows:
            values_n: Tensor | None = getattr(scores, field, None)
            if values_n is None:  # no pass was made, or the learner knows no entropy
                break
            for position, number in zip(
                row.positions_n.tolist(), _short(values_n.float().tolist()), strict=True
            ):
                values[ends[row.sequence] + position] = number
        else:
            spread |= {name: values} if rows else {}
    return spread


def _short(values: Sequence[float]) -> list[float]:
    """Return the values rounded to four digits: the viewer shows them as colours, and a run has many."""
    return [round(value, 4) for value in values]
