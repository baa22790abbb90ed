"""Report from time to time how the workers, the driver and the servers are doing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import chain
from typing import Any, TypeAlias

from agentenv.core.faults import class_of, message_of
from agentenv.core.visible import logger
from agentenv.engine.interface import features_of
from agentenv.workers.servers import together
from agentenv.workers.usage import Usage
from agentenv.workers.worker import ClusterLost, Worker, WorkerLost

__all__ = ["REPORT_EVERY_S", "Reports", "Tell", "reporting_servers", "stats_of"]

_log = logger(__name__)

REPORT_EVERY_S = 10.0
"""Time between two reports."""
ANSWER_S = 5.0
"""Time after which a worker that does not say how it is doing counts as silent."""

Tell: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], None]
"""Called with one row for the driver and one for each worker, or with one for each server."""


class Repeated:
    """Calls a function every ten seconds while its context is open, and once more at its end.

    Args:
        report: the function; what it raises is logged, because a report must not end the run.
    """

    def __init__(self, report: Callable[[], Awaitable[None]]) -> None:
        self._report = report
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._go_on())

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._safely()

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            await self._safely()

    async def _safely(self) -> None:
        try:
            await self._report()
        except Exception as error:  # noqa: BLE001 - a report that cannot be written must not end the run
            _log.warning("a report of the run was not written: %s: %s", class_of(error), message_of(error))


def reporting_servers(engine: object, tell: Tell | None) -> AbstractAsyncContextManager[None]:
    """Return a context in which `tell` is called with the servers that an engine of this process uses."""
    servers = features_of(engine).servers
    if tell is None or not servers():
        return nullcontext()

    async def report() -> None:
        tell(together(servers()))

    return Repeated(report)


class Reports:
    """Reports on workers while its context is open.

    Args:
        stats: returns the rows of the workers.
        driver: returns the counts that only the driver knows.
        tell: called with the rows.
        tell_servers: called with a row for each server that the workers use, if there are any.
    """

    def __init__(
        self,
        stats: Callable[[], Awaitable[Sequence[dict[str, Any]]]],
        driver: Callable[[], Mapping[str, Any]],
        tell: Tell,
        tell_servers: Tell | None = None,
    ) -> None:
        self._stats, self._driver, self._tell = stats, driver, tell
        self._tell_servers = tell_servers
        self._usage = Usage()
        self._repeated = Repeated(self._report)
        self.servers: list[dict[str, Any]] = []
        """The servers as of the last report."""

    async def __aenter__(self) -> None:
        await self._usage.__aenter__()
        await self._repeated.__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await self._repeated.__aexit__()
        await self._usage.__aexit__()

    async def _report(self) -> None:
        driver = {"worker": "driver", **self._usage.row(), **self._driver()}
        workers = await self._stats()
        servers = [row.pop("servers", []) for row in workers]
        for row in workers:
            if row.get("silent"):
                _log.warning(
                    "worker %s does not answer: its event loop is blocked, perhaps by an async method "
                    "that computes or waits without await",
                    row["worker"],
                )
        self._tell([driver, *workers])
        self.servers = together(chain.from_iterable(servers))
        if self._tell_servers is not None and self.servers:
            self._tell_servers(self.servers)


async def stats_of(worker: Worker) -> dict[str, Any]:
    """Return how a worker is doing; nothing if it has died, and that it is silent if it does not answer."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await worker.stats()
    except TimeoutError:
        return {"worker": worker.name, "time": time.time(), "silent": True}
    except (WorkerLost, ClusterLost):
        return {}
