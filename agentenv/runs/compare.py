"""Two runs side by side: paired by task, with an interval, and where their episodes part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.runs.stats import Interval, bootstrap_mean
from agentenv.runs.store.reader import Run
from agentenv.runs.store.summary import EpisodeSummary

__all__ = ["Comparison", "Divergence", "TaskChange", "compare", "first_divergence"]

SAME = 1e-9
"""Mean rewards closer together than this are the same."""


@dataclass(frozen=True, slots=True)
class TaskChange:
    """One task in both runs."""

    env_id: str
    task_id: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """Mean reward after minus before."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between two episodes of one task and member."""

    task_id: str
    member: int
    turn: int
    token: int | None
    """Place in the token sequence; None where one of them has no tokens."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed from one run to another, over the tasks that both scored."""

    tasks: tuple[TaskChange, ...]
    difference: Interval | None
    """Mean change with a paired bootstrap interval; None if no task is common."""
    before: float
    after: float
    only_before: int
    """Tasks scored in the first run alone."""
    only_after: int
    divergence: Divergence | None
    """In the first episode that differs, in the order of the first run; None if all agree."""

    @property
    def better(self) -> tuple[TaskChange, ...]:
        """Tasks whose mean reward rose."""
        return tuple(one for one in self.tasks if one.change > SAME)

    @property
    def worse(self) -> tuple[TaskChange, ...]:
        """Tasks whose mean reward fell."""
        return tuple(one for one in self.tasks if one.change < -SAME)

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values."""
        counts = {"better": len(self.better), "worse": len(self.worse)}
        return {**asdict(self), **counts, "same": len(self.tasks) - sum(counts.values())}


def compare(before: Run, after: Run, *, seed: int = 0) -> Comparison:
    """Compare two runs, paired by environment and task.

    Args:
        before: the run to compare with.
        after: the run that is judged.
        seed: of the bootstrap.
    """
    left, right = _by_task(before.summaries), _by_task(after.summaries)
    changes = tuple(TaskChange(*key, _mean(left[key]), _mean(right[key])) for key in left if key in right)
    differences = [one.change for one in changes]
    return Comparison(
        tasks=changes,
        difference=bootstrap_mean(differences, seed=seed) if differences else None,
        before=_mean([one.before for one in changes]),
        after=_mean([one.after for one in changes]),
        only_before=len(left.keys() - right.keys()),
        only_after=len(right.keys() - left.keys()),
        divergence=_divergence(before, after),
    )


def _by_task(summaries: Sequence[EpisodeSummary]) -> Mapping[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for one in summaries:
        if one.scored and one.reward is not None:
            found.setdefault((one.env_id, one.task_id), []).append(one.reward)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _divergence(before: Run, after: Run) -> Divergence | None:
    others = {one.key: one for one in after.summaries}
    for summary in before.summaries:
        other = others.get(summary.key)
        if other is not None:
            found = first_divergence(before.load(summary), after.load(other))
            if found is not None:
                return found
    return None


def first_divergence(left: Trajectory, right: Trajectory) -> Divergence | None:
    """Return where two episodes first differ, by tokens if both have them, else by messages."""
    if left.sequences and right.sequences:
        ours, theirs = left.sequences[0], right.sequences[0]
        turns = ours.turn_index if len(ours) >= len(theirs) else theirs.turn_index
        place = _first_difference(ours.token_ids, theirs.token_ids)
        if place is not None:
            return Divergence(left.task_id, left.member, max(0, turns[place]), place)
        return None
    place = _first_difference(left.messages, right.messages)
    if place is None:
        return None
    turn = sum(message["role"] == "assistant" for message in left.messages[:place])
    return Divergence(left.task_id, left.member, turn, None)


def _first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    for place, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if ours != theirs:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))
