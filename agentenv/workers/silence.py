"""Kill workers whose event loop is blocked: nothing in such a process can end an episode any more.

The time limits of an episode are kept by the event loop on which it is played. An async method that computes
without `await`, or a process that was stopped, keeps the loop from keeping them, so the driver does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agentenv.core.limits import RunLimits
from agentenv.workers.worker import ClusterLost, Worker, WorkerLost

__all__ = ["Watch", "answers", "last_answer"]

_T = TypeVar("_T")

ENDING_S = 10.0
"""Time in which a worker that is to end has to answer, whatever the limits of the run allow."""
GRACE_S = 10.0
"""Time beyond the limits, because an event loop may also be late with much to do."""
ASK_EVERY_S = 10.0
"""Longest time between two questions to a worker that answers."""
QUESTIONS = 4
"""Questions in a row that a blocked worker leaves unanswered. With one alone, a driver that was stopped
itself would find all its workers silent when it goes on."""


class Watch:
    """Asks workers from time to time, and kills those that do not answer.

    Args:
        ask: asks a worker something.
    """

    # Invariant: `_tasks` has a task for each worker that was begun and not ended.

    def __init__(self, ask: Callable[[Worker], Awaitable[object]]) -> None:
        self._ask = ask
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._limits: list[float | None] = []

    def allow(self, limits: RunLimits) -> None:
        """Let workers be silent for as long as these limits let a piece of an episode last."""
        self._limits.append(_longest(limits))

    def begin(self, worker: Worker) -> None:
        """Watch a worker until it ends."""
        self._tasks[worker.name] = asyncio.create_task(self._watch(worker))

    async def end(self, worker: Worker) -> None:
        """Watch a worker no more, because it is closed."""
        if (task := self._tasks.pop(worker.name, None)) is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _watch(self, worker: Worker) -> None:
        unanswered, pause = 0, 0.0
        while unanswered < QUESTIONS:
            limit = None if None in self._limits else max(filter(None, self._limits), default=None)
            pause = ((limit or 0.0) + GRACE_S) / QUESTIONS
            try:
                async with asyncio.timeout(pause):
                    await self._ask(worker)
            except TimeoutError:
                unanswered += limit is not None
            except (WorkerLost, ClusterLost):
                return
            else:
                unanswered = 0
                await asyncio.sleep(min(pause, ASK_EVERY_S))
        worker.kill(
            f"was killed, because it answered nothing for {pause * QUESTIONS:.0f} s: its event loop is "
            "blocked, perhaps by an async method that computes or waits without await"
        )


async def answers(worker: Worker) -> bool:
    """Return whether a worker that is to end answers at all."""
    try:
        async with asyncio.timeout(ENDING_S):
            await worker.stats()
    except (TimeoutError, WorkerLost, ClusterLost):
        return False
    return True


async def last_answer(worker: Worker, answer: Awaitable[_T]) -> _T:
    """Await the answer to a request that was cancelled; a worker that is silent meanwhile is killed.

    Raises:
        WorkerLost: The process died.
    """
    waiting = asyncio.ensure_future(answer)
    while not (await asyncio.wait({waiting}, timeout=ENDING_S))[0]:
        if not await answers(worker):
            worker.kill(f"was killed, because it was to end and answered nothing for {ENDING_S:.0f} s")
    return waiting.result()


def _longest(limits: RunLimits) -> float | None:
    """Return how long code of an environment may run at a stretch; None if nothing limits it."""
    pieces = (limits.tool_timeout_s, limits.env_timeout_s, limits.reward_timeout_s)
    longest = max((piece for piece in pieces if piece is not None), default=0.0)
    known = [] if None in pieces else [longest]
    return min([*known, *filter(None, [limits.episode_timeout_s])], default=None)
