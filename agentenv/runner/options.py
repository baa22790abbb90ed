"""How a run plays its episodes, apart from what each episode may spend (`RunLimits`)."""

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
    """Options of a `Runner`; the section `runner` of every configuration.

    Raises:
        UsageError: A value is out of range.
    """

    concurrency: PositiveInt = 32
    """Episodes in flight at once."""
    retries: NonNegativeInt = 1
    """Further attempts at an episode whose infrastructure failed in a way that may pass."""
    retry_wait_s: NonNegativeSeconds = 0.5
    """Wait before the first further attempt; doubled each time."""
    history: Literal["verbatim", "rewrite"] = "verbatim"
    """`verbatim` sends again what was sampled and sent, as it is; `rewrite` renders the messages anew each
    turn, as a deployment would, and goes on in a new sequence where that differs (a template that drops
    thinking, for example)."""
    close_timeout_s: PositiveSeconds = 30.0
    """For closing an environment or a user, and for code to obey a cancellation."""
    lease_timeout_s: PositiveSeconds | None = 600.0
    """For a sandbox to be lent; the wait is no part of the episode's own deadline."""
    warn_after_s: PositiveSeconds | None = 300.0
    """Log what an episode waits for after this long; None never."""

    def __post_init__(self) -> None:
        check_bounds(self)
