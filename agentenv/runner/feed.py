"""Jobs that a run receives while it plays, for `Runner.run_jobs`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from agentenv.runner.plan import Job

__all__ = ["JobFeed", "NoJobYet"]


class NoJobYet(Exception):
    """There is no job now, but there may be one later."""


class JobFeed:
    """Hands out jobs in the order in which they were put in; a run waits for more until it is closed.

    Args:
        on_start: called with each job when it is taken, which is when its first episode begins.
    """

    def __init__(self, on_start: Callable[[Job], None] | None = None) -> None:
        self._jobs: deque[Job] = deque()
        self._on_start = on_start
        self._closed = False
        self.on_change: Callable[[], None] | None = None
        """Called after a job was put in, and when the feed is closed; the run that reads the feed sets it."""

    @property
    def ended(self) -> bool:
        """Whether the feed is closed and has no job left."""
        return self._closed and not self._jobs

    def put(self, job: Job) -> None:
        """Add a job, which begins as soon as there is room."""
        self._jobs.append(job)
        self._changed()

    def close(self) -> None:
        """Say that no further job comes, so that the run ends after those that were put in."""
        self._closed = True
        self._changed()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def __iter__(self) -> JobFeed:
        return self

    def __next__(self) -> Job:
        if not self._jobs:
            raise StopIteration if self._closed else NoJobYet
        job = self._jobs.popleft()
        if self._on_start is not None:
            self._on_start(job)
        return job
