"""Compare two runs: the paired difference of their rewards, and where their episodes first differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentenv.core.trajectory import Trajectory
from agentenv.core.visible import one_line
from agentenv.runs.stats import Interval, bootstrap_mean, mean_of
from agentenv.runs.store.reader import Run
from agentenv.runs.store.runinfo import RunInfo
from agentenv.runs.store.summary import EpisodeSummary

__all__ = ["Comparison", "Divergence", "TaskChange", "compare", "first_divergence"]

SAME = 1e-9
"""Mean rewards that differ by at most this much count as equal."""


@dataclass(frozen=True, slots=True)
class TaskChange:
    """The mean rewards of one task in both runs."""

    env_id: str
    task_id: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """Mean reward of the second run minus that of the first."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between two episodes of the same task and member."""

    task_id: str
    member: int
    turn: int
    token: int | None
    """Index in the token sequence; None if one of the episodes has no tokens."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed between two runs, over the tasks that have a score in both."""

    tasks: tuple[TaskChange, ...]
    difference: Interval | None
    """Mean change with a paired bootstrap interval; None if the runs have no task in common."""
    before: float
    after: float
    only_before: int
    """Number of tasks that have a score only in the first run."""
    only_after: int
    """Number of tasks that have a score only in the second run."""
    divergence: Divergence | None
    """First difference in the first episode that differs, by the first run's order; None if all agree."""
    changed: tuple[str, ...] = ()
    """What is not the same in both runs besides the model: files of code, tasks, settings and terms. If there
    is any, the difference says nothing about the model alone."""

    @property
    def better(self) -> tuple[TaskChange, ...]:
        """Tasks whose mean reward rose."""
        return tuple(task for task in self.tasks if task.change > SAME)

    @property
    def worse(self) -> tuple[TaskChange, ...]:
        """Tasks whose mean reward fell."""
        return tuple(task for task in self.tasks if task.change < -SAME)

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values."""
        counts = {"better": len(self.better), "worse": len(self.worse)}
        return {**asdict(self), **counts, "same": len(self.tasks) - sum(counts.values())}

    def __repr__(self) -> str:
        changes = f"{len(self.better)} tasks better", f"{len(self.worse)} worse"
        return one_line(
            self, f"reward {self.before:.3g} to {self.after:.3g}", *changes, f"{len(self.tasks)} in all"
        )


def compare(before: Run, after: Run, *, seed: int = 0) -> Comparison:
    """Compare two runs, paired by environment and task.

    Args:
        before: the first run, which is the reference.
        after: the second run, which is compared with the reference.
        seed: seed of the bootstrap.
    """
    left, right = _by_task(before.results), _by_task(after.results)
    changes = tuple(TaskChange(*key, mean_of(left[key]), mean_of(right[key])) for key in left if key in right)
    differences = [task.change for task in changes]
    return Comparison(
        tasks=changes,
        difference=bootstrap_mean(differences, seed=seed) if differences else None,
        before=mean_of([task.before for task in changes]),
        after=mean_of([task.after for task in changes]),
        only_before=len(left.keys() - right.keys()),
        only_after=len(right.keys() - left.keys()),
        divergence=_divergence(before, after),
        changed=tuple(_changed(before.info, after.info)),
    )


def _changed(before: RunInfo, after: RunInfo) -> Iterator[str]:
    ours, theirs = before.made_of, after.made_of
    if ours and theirs:  # a run that was imported, or that an older release wrote, has no digests
        yield from (name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name))
    if before.terms and after.terms and before.terms != after.terms:
        ours, theirs = (
            ", ".join(term for term in one if term not in other) or "nothing"
            for one, other in ((before.terms, after.terms), (after.terms, before.terms))
        )
        yield f"the terms ({ours} against {theirs})"


def _by_task(summaries: Sequence[EpisodeSummary]) -> Mapping[tuple[str, str], list[float]]:
    rewards: dict[tuple[str, str], list[float]] = {}
    for summary in summaries:
        if summary.scored and summary.reward is not None:
            rewards.setdefault((summary.env_id, summary.task_id), []).append(summary.reward)
    return rewards


def _divergence(before: Run, after: Run) -> Divergence | None:
    others = {other.key: other for other in after.summaries}
    for summary in before.summaries:
        other = others.get(summary.key)
        if other is not None:
            divergence = first_divergence(before.load(summary), after.load(other))
            if divergence is not None:
                return divergence
    return None


def first_divergence(left: Trajectory, right: Trajectory) -> Divergence | None:
    """Return where two episodes first differ: by tokens if both have tokens, otherwise by messages."""
    if left.sequences and right.sequences:
        ours, theirs = left.sequences[0], right.sequences[0]
        # If one sequence is the beginning of the other, they part where only the longer one has turns.
        turns = ours.turn_index if len(ours) >= len(theirs) else theirs.turn_index
        index = _first_difference(ours.token_ids, theirs.token_ids)
        if index is not None:
            return Divergence(left.task_id, left.member, max(0, turns[index]), index)
        return None
    index = _first_difference(left.messages, right.messages)
    if index is None:
        return None
    turn = sum(message["role"] == "assistant" for message in left.messages[:index])
    return Divergence(left.task_id, left.member, turn, None)


def _first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    for index, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if ours != theirs:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
