"""How a run plays its episodes, apart from what each episode may spend (`RunLimits`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentenv.core.errors import UsageError

__all__ = ["RunnerOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """Options of a `Runner`; the section `runner` of every configuration.

    Raises:
        UsageError: A value is out of range.
    """

    concurrency: int = 32
    """Episodes in flight at once."""
    retries: int = 1
    """Further attempts at an episode whose infrastructure failed in a way that may pass."""
    retry_wait_s: float = 0.5
    """Wait before the first further attempt; doubled each time."""
    history: Literal["verbatim", "rewrite"] = "verbatim"
    """`verbatim` sends again what was sampled and sent, as it is; `rewrite` renders the messages anew each
    turn, as a deployment would, and goes on in a new sequence where that differs (a template that drops
    thinking, for example)."""
    close_timeout_s: float = 30.0
    """For closing an environment or a user, and for code to obey a cancellation."""
    lease_timeout_s: float | None = 600.0
    """For a sandbox to be lent; the wait is no part of the episode's own deadline."""
    warn_after_s: float | None = 300.0
    """Log what an episode waits for after this long; None never."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise UsageError(f"concurrency must be at least 1, not {self.concurrency}")
        if self.retries < 0:
            raise UsageError(f"retries must be 0 or more, not {self.retries}")
        if self.history not in {"verbatim", "rewrite"}:
            raise UsageError(f"history is 'verbatim' or 'rewrite', not {self.history!r}")
