"""Episode counts of a run that must add up: every submitted episode has exactly one outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentenv.core.trajectory import StopReason, Trajectory

__all__ = ["Ledger"]


@dataclass(slots=True)
class Ledger:
    """Episode counts of a run; `balanced` is true at every moment."""

    submitted: int = 0
    """Number of episodes started."""
    outcomes: dict[StopReason, int] = field(default_factory=dict[StopReason, int])
    """Number of finished episodes by stop reason."""
    cancelled: int = 0
    """Number of episodes that the program cancelled."""
    in_flight: int = 0
    """Number of episodes being played."""
    retried: int = 0
    """Number of further attempts after infrastructure failed; these are not extra episodes."""

    def start(self) -> None:
        """Count a submitted episode."""
        self.submitted += 1
        self.in_flight += 1

    def finish(self, trajectory: Trajectory) -> None:
        """Count the outcome of a finished episode, and of those of the other seats of its game."""
        self.in_flight -= 1
        self.submitted += len(trajectory.other_seats)
        for episode in (trajectory, *trajectory.other_seats):
            self.outcomes[episode.stop_reason] = self.outcomes.get(episode.stop_reason, 0) + 1

    def cancel(self) -> None:
        """Count a cancelled episode."""
        self.in_flight -= 1
        self.cancelled += 1

    @property
    def balanced(self) -> bool:
        """True if `submitted` is the sum of the outcomes, `cancelled` and `in_flight`."""
        return self.submitted == sum(self.outcomes.values()) + self.cancelled + self.in_flight
