"""Report from time to time how the workers and the driver are doing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from agentenv.core.faults import class_of, message_of
from agentenv.workers.usage import Usage
from agentenv.workers.worker import Worker, WorkerLost

__all__ = ["REPORT_EVERY_S", "Reports", "Tell", "stats_of"]

_log = logging.getLogger(__name__)

REPORT_EVERY_S = 10.0
"""Time between two reports."""
ANSWER_S = 5.0
"""Time after which a worker that does not say how it is doing counts as silent."""

Tell: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], None]
"""Called with one row for the driver and one for each worker."""


class Reports:
    """Reports while its context is open, and once more at its end.

    Args:
        stats: returns the rows of the workers.
        driver: returns the counts that only the driver knows.
        tell: called with the rows.
    """

    def __init__(
        self,
        stats: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]],
        driver: Callable[[], Mapping[str, Any]],
        tell: Tell,
    ) -> None:
        self._stats, self._driver, self._tell = stats, driver, tell
        self._usage = Usage()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        await self._usage.__aenter__()
        self._task = asyncio.create_task(self._go_on())

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._report()
        await self._usage.__aexit__()

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            await self._report()

    async def _report(self) -> None:
        try:
            driver = {"worker": "driver", **self._usage.row(), **self._driver()}
            workers = await self._stats()
            for row in workers:
                if row.get("silent"):
                    _log.warning(
                        "worker %s does not answer: its event loop is blocked, perhaps by an async method "
                        "that computes or waits without await",
                        row["worker"],
                    )
            self._tell([driver, *workers])
        except Exception as error:  # noqa: BLE001 - a report that cannot be written must not end the run
            _log.warning("the workers' report was not written: %s: %s", class_of(error), message_of(error))


async def stats_of(worker: Worker) -> dict[str, Any]:
    """Return how a worker is doing; nothing if it has died, and that it is silent if it does not answer."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await worker.stats()
    except TimeoutError:
        return {"worker": worker.name, "time": time.time(), "silent": True}
    except WorkerLost:
        return {}
