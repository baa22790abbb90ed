"""Options for playing the episodes of a run. The limits of each episode are in `RunLimits`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentenv.core.bounds import (
    NonNegativeInt,
    NonNegativeSeconds,
    PositiveInt,
    PositiveSeconds,
    check_bounds,
)

__all__ = ["RunnerOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """Options of a `Runner`. They are the section `runner` of every configuration.

    Raises:
        UsageError: A value is out of range.
    """

    concurrency: PositiveInt = 32
    """Limit of episodes that run at once."""
    retries: NonNegativeInt = 1
    """Further attempts at an episode after a temporary failure of infrastructure."""
    retry_wait_s: NonNegativeSeconds = 0.5
    """Wait before the first further attempt; the wait doubles with each attempt."""
    history: Literal["verbatim", "rewrite"] = "verbatim"
    """`verbatim` sends the tokens of earlier turns again, unchanged. `rewrite` renders all messages anew each
    turn, as a deployment would, and continues in a new sequence where the tokens differ, for example because
    the template drops thinking."""
    close_timeout_s: PositiveSeconds = 30.0
    """Time limit for closing an environment or a user, and for code to react to its cancellation."""
    lease_timeout_s: PositiveSeconds | None = 600.0
    """Time limit for getting a sandbox; this wait does not count towards the episode's deadline."""
    warn_after_s: PositiveSeconds | None = 300.0
    """Log what an episode waits for after this time; None disables the log."""

    def __post_init__(self) -> None:
        check_bounds(self)
