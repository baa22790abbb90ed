"""Waiting for foreign code: within its own limit, within the episode's deadline, with its name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from agentenv.boundary import Boundary, Failure, Halt, at
from agentenv.context import Context
from agentenv.trajectory import StopReason

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
        scope = asyncio.timeout(left)
        self.due = None if left is None else self.since + left
        try:
            with at(boundary):
                async with scope:
                    return await function(*args, **kwargs)
        except Failure as failure:
            if not scope.expired():
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
