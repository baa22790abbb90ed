"""The books of a run: every episode submitted has exactly one outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentenv.core.trajectory import StopReason, Trajectory

__all__ = ["Ledger"]


@dataclass(slots=True)
class Ledger:
    """Counts of episodes; `check` holds at every moment."""

    submitted: int = 0
    """Episodes started."""
    outcomes: dict[StopReason, int] = field(default_factory=dict[StopReason, int])
    """Episodes finished, by stop reason."""
    cancelled: int = 0
    """Episodes that the program cancelled."""
    in_flight: int = 0
    """Episodes being played."""
    retried: int = 0
    """Attempts made again after infrastructure failed; not episodes."""

    def start(self) -> None:
        """Book a submitted episode."""
        self.submitted += 1
        self.in_flight += 1

    def finish(self, trajectory: Trajectory) -> None:
        """Book an outcome."""
        self.in_flight -= 1
        self.outcomes[trajectory.stop_reason] = self.outcomes.get(trajectory.stop_reason, 0) + 1

    def cancel(self) -> None:
        """Book a cancelled episode."""
        self.in_flight -= 1
        self.cancelled += 1

    @property
    def balanced(self) -> bool:
        """True if submitted equals the sum of outcomes, cancelled and in flight."""
        return self.submitted == sum(self.outcomes.values()) + self.cancelled + self.in_flight
