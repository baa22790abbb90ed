"""How far a training has come in its tasks, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

__all__ = ["DealtGroup", "Place"]


@dataclass(frozen=True, slots=True)
class DealtGroup:
    """A group that was dealt and not trained; it can be dealt again with the same task, id and seeds."""

    env: str
    """Name of its environment in the mixture."""
    cursor: int
    """Index of its task in the rounds of the environment."""
    round_index: int
    """Round of the run, which the id and the seeds of the group depend on."""
    repeat: int
    """Number of times that the task came before in the round."""
    group_id: str


@dataclass(frozen=True, slots=True)
class Place:
    """The tasks that a training has used. Dealing goes on from here, with nothing lost and nothing twice."""

    cursors: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of tasks taken so far, by environment."""
    rounds: int = 0
    """Number of rounds that were dealt, so that no later one has the same number."""
    untrained: tuple[DealtGroup, ...] = ()
    """Groups of a stream that were dealt and not trained, in the order in which they were dealt."""

    def record(self) -> dict[str, Any]:
        """Return the place as JSON values, for a checkpoint."""
        return {
            "cursors": dict(self.cursors),
            "rounds": self.rounds,
            "untrained": [asdict(group) for group in self.untrained],
        }

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> Self:
        """Return the place that `record` wrote into a checkpoint."""
        untrained = tuple(DealtGroup(**group) for group in record.get("untrained", ()))
        return cls(dict(record["cursors"]), record.get("rounds", 0), untrained)
