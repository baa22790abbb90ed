"""Whether this process is a worker, which must not start workers itself."""

from __future__ import annotations

import threading

from agentenv.core.errors import UsageError

__all__ = ["mark_as_worker", "refuse_in_worker"]

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
