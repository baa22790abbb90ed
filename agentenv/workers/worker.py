"""What a crew expects of a worker, whatever process or machine it is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from agentenv.core.errors import AgentEnvError, InfrastructureError, UsageError

if TYPE_CHECKING:
    from agentenv.engine.interface import Completion
    from agentenv.workers.episode_worker import Order, OrderKey, Played

__all__ = [
    "CANCELLED",
    "ClusterLost",
    "Worker",
    "WorkerLost",
    "mark_as_worker",
    "refuse_in_worker",
    "require_played",
]

CANCELLED = 79
"""Exit status of a worker whose loop was stopped, or its own tasks cancelled, by code that it played."""


class WorkerLost(AgentEnvError, RuntimeError):
    """A worker died, so it will not answer."""


class ClusterLost(InfrastructureError):
    """The cluster of the workers has gone, so no worker will answer and none can be replaced."""


class Worker(Protocol):
    """One process that plays episodes."""

    @property
    def name(self) -> str:
        """Name of the worker, which no other worker of the run has."""
        ...

    async def start(self) -> None:
        """Start the process and wait until the recipe is open in it.

        Raises:
            UsageError: The recipe cannot be opened there; the message holds the reason.
            WorkerLost: The process died.
        """
        ...

    async def play(self, order: Order) -> Played:
        """Play an episode; a cancellation cancels it, and its record is returned if it was complete.

        Raises:
            WorkerLost: The process died.
        """
        ...

    async def expect_weights(self, version: int, run: str) -> None:
        """Tell the worker's engine which weights its servers have now, and which training pushed them."""
        ...

    async def stats(self) -> dict[str, Any]:
        """Return how the worker is doing.

        Raises:
            WorkerLost: The process died.
        """
        ...

    async def turns(self) -> dict[OrderKey, dict[str, Completion]]:
        """Return the completions of long episodes since the last call, by episode and request.

        Raises:
            WorkerLost: The process died.
        """
        ...

    def kill(self, why: str) -> None:
        """End the process at once; `WorkerLost` then says of the worker that it `why`."""
        ...

    async def close(self) -> None:
        """Let the worker close its environments, and end the process."""
        ...


def require_played(worker: Worker, played: Played | None) -> Played:
    """Return an episode that the driver has not cancelled.

    Raises:
        WorkerLost: It was cancelled in the worker, where nobody but code that is played can do so.
    """
    if played is None:
        raise WorkerLost(
            f"worker {worker.name} lost an episode, whose task code that it played has cancelled"
        )
    return played


_is_worker = threading.Event()


def mark_as_worker() -> None:
    """Note that this process plays episodes for a driver."""
    _is_worker.set()


def refuse_in_worker() -> None:
    """Refuse to start workers in a worker.

    Raises:
        UsageError: This process is a worker, so the module that defines the environment starts the run.
    """
    if _is_worker.is_set():
        raise UsageError(
            "a worker was about to start workers: the file that defines the environment starts a run when it "
            "is imported",
            remedy="put the code that starts the run under: if __name__ == '__main__':",
        )
