"""Waiting for foreign code: within its own limit, within the episode's deadline, with its name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import CoroutineType, coroutine
from typing import ParamSpec, TypeVar

from agentenv.core.context import Context
from agentenv.core.trajectory import StopReason
from agentenv.runner.guard import Boundary, Failure, Halt, at

__all__ = ["Waits"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Waits:
    """Guards every wait of one episode and knows what it waits for.

    Args:
        context: holds the episode's deadline.
    """

    __slots__ = ("_context", "boundary", "due", "since")

    def __init__(self, context: Context) -> None:
        self._context = context
        self.boundary: Boundary = "env"
        """Whose code the episode waits for."""
        self.since = time.monotonic()
        """Since when."""
        self.due: float | None = None
        """When the wait ought to be over; None without a limit, and between waits."""

    async def within(
        self,
        boundary: Boundary,
        limit_s: float | None,
        function: Callable[_P, Awaitable[_T]],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        """Await foreign code within its limit and the episode's deadline.

        Raises:
            Halt: The deadline passed, or the engine took longer than a turn may.
            Failure: The code raised, or took longer than its limit.
        """
        self.boundary, self.since = boundary, time.monotonic()
        left, is_deadline = self.left(limit_s)
        if left == 0:
            raise Halt(StopReason.DEADLINE)
        self.due = None if left is None else self.since + left
        scope: asyncio.Timeout | None = None
        try:
            with at(boundary):
                answer = _coroutine(function(*args, **kwargs))
                try:
                    waits_for = answer.send(None)
                except StopIteration as done:
                    # It never waited: no timer was needed, and most calls are of this kind.
                    return done.value
                scope = asyncio.timeout(None if self.due is None else self.due - time.monotonic())
                async with scope:
                    return await _rest(answer, waits_for)
        except Failure as failure:
            if scope is None or not scope.expired():
                raise
            if is_deadline or boundary == "engine":
                raise Halt(StopReason.DEADLINE) from failure
            late = TimeoutError(f"{boundary}: no answer within {limit_s} s")
            raise Failure.of(boundary, late) from failure
        finally:
            self.due = None

    def left(self, limit_s: float | None, *, spent: bool = False) -> tuple[float | None, bool]:
        """Seconds that a wait may take, and whether it is the episode's deadline that says so.

        Args:
            limit_s: of the wait itself.
            spent: count the time since the present wait began.
        """
        now = time.monotonic()
        if limit_s is not None and spent:
            limit_s = max(limit_s - (now - self.since), 0.0)
        deadline = self._context.deadline
        if deadline is None:
            return limit_s, False
        left = max(deadline - now, 0.0)
        return (left, True) if limit_s is None or left <= limit_s else (limit_s, False)


def _coroutine(awaitable: Awaitable[_T]) -> Coroutine[object, object, _T]:
    if isinstance(awaitable, CoroutineType):
        return awaitable

    async def wait() -> _T:
        return await awaitable

    return wait()


@coroutine
def _rest(answer: Coroutine[object, object, _T], waits_for: object) -> Generator[object, object, _T]:
    """Go on with a coroutine that was begun and waits for something; as `await` would."""
    try:
        while True:
            try:
                sent = yield waits_for
            except GeneratorExit:
                answer.close()
                raise
            except BaseException as error:  # noqa: BLE001 - thrown into the coroutine, as `await` does
                waits_for = answer.throw(error)
            else:
                waits_for = answer.send(sent)
    except StopIteration as done:
        return done.value
