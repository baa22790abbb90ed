"""The interface through which a runner has its episodes played in other processes."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from agentenv.core.trajectory import Trajectory
from agentenv.runner.plan import Job
from agentenv.runner.stage import Stage
from agentenv.runner.watchdog import Ledger

__all__ = ["Elsewhere", "Playing"]


class Playing(Protocol):
    """What plays single members of groups: a `Stage`, or one that another process holds."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def play(
        self, job: Job, member: int = 0, *, on_record: Callable[[Trajectory], None] | None = None
    ) -> Trajectory:
        """Play one member of a group; see `Stage.play`."""
        ...


class Elsewhere(Protocol):
    """Plays the episodes of a runner in other processes."""

    def stage(self, stage: Stage, ledger: Ledger) -> Playing:
        """Return what plays the same episodes as a stage of this process.

        Args:
            stage: the stage, which is never opened.
            ledger: counts of the run, in which the episodes are counted.

        Raises:
            UsageError: The stage has an environment that the other processes do not know.
        """
        ...
