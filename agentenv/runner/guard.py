"""Awaiting code of others: under its time limit and the episode's deadline, and what its errors mean.

An episode ends in one of three ways, and each is data: it comes to a stop (`Halt`), it fails
(`Failure`), or the program cancels it. Rules:

1. Infrastructure (engine, sandbox, a judge's or simulated user's engine) makes an episode
   `aborted`; code of an environment, reward, parser or user makes it `error`.
2. A prompt that the engine refuses as too long is a stop, never a failure and never retried.
3. Only a real cancellation of the running task passes through; a `CancelledError` or `SystemExit`
   that the guarded code raised by itself is a failure like any other.
4. The episode's deadline, and an engine that takes longer than a turn may, are stops. Any other code
   that takes longer than its limit has failed.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from types import TracebackType
from typing import Literal, TypeAlias

from agentenv.core.context import Context
from agentenv.core.errors import (
    AlignmentError,
    ContextTooLong,
    EngineError,
    EngineUnavailable,
    SandboxCrashed,
    SandboxError,
)
from agentenv.core.trajectory import EpisodeError, StopReason

__all__ = ["Boundary", "Failure", "Guard", "Halt", "at"]

Boundary: TypeAlias = Literal["env", "tool", "engine", "reward", "parser", "sandbox", "user", "render"]
"""Whose code was running."""

MAX_MESSAGE_CHARS = 4_000
MAX_TRACEBACK_CHARS = 20_000


class Halt(Exception):
    """The episode came to a stop."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Failure(Exception):
    """The episode failed: it is recorded with its cause and never trained."""

    def __init__(self, reason: StopReason, error: EpisodeError) -> None:
        super().__init__(error.message)
        self.reason = reason
        self.error = error

    @classmethod
    def of(cls, boundary: Boundary, error: BaseException) -> Failure:
        """Classify an exception by its type and by whose code raised it."""
        reason, retryable = StopReason.ERROR, False
        if isinstance(error, SandboxError):
            boundary, reason, retryable = "sandbox", StopReason.ABORTED, isinstance(error, SandboxCrashed)
        elif isinstance(error, EngineError):
            reason, retryable = StopReason.ABORTED, isinstance(error, EngineUnavailable)
        elif boundary in {"engine", "sandbox"}:
            # A completion without exact logprobs may be whole on another attempt.
            reason, retryable = StopReason.ABORTED, isinstance(error, (OSError, TimeoutError, AlignmentError))
        text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]
        message = str(error)[:MAX_MESSAGE_CHARS]
        return cls(reason, EpisodeError(boundary, type(error).__name__, message, text, retryable))


def _meaning(boundary: Boundary, error: BaseException) -> Halt | Failure | None:
    """Return what an exception makes of the episode; None if the exception is to go on as it is."""
    if isinstance(error, (Halt, Failure, GeneratorExit, KeyboardInterrupt)):
        return None
    if isinstance(error, asyncio.CancelledError):
        # `cancelling()` counts the requests to cancel this task. Without one, code that the episode
        # awaited raised the error itself, for example because it awaited a task that it had cancelled.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            return None
    if isinstance(error, ContextTooLong) and boundary == "engine":
        return Halt(StopReason.CONTEXT_LENGTH)
    return Failure.of(boundary, error)


class at:
    """Turn whatever the guarded code raises into a `Halt` or a `Failure`; it sets no time limit."""

    __slots__ = ("_boundary",)

    def __init__(self, boundary: Boundary) -> None:
        self._boundary: Boundary = boundary

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        meaning = None if error is None else _meaning(self._boundary, error)
        if meaning is not None:
            raise meaning from error


class Guard:
    """Guards every wait of one episode, and tells the watchdog what the episode waits for.

    Args:
        context: holds the episode's deadline.
    """

    # Invariant: an episode waits for one thing at a time, so one set of fields describes its wait.
    __slots__ = ("_context", "boundary", "due", "since")

    def __init__(self, context: Context) -> None:
        self._context = context
        self.boundary: Boundary = "env"
        """Whose code the episode waits for."""
        self.since = time.monotonic()
        """Since when."""
        self.due: float | None = None
        """When the wait ought to be over; None without a limit, and between waits."""

    def waiting(self, boundary: Boundary, limit_s: float | None) -> _Wait:
        """Return the context in which code of others is awaited; entered, it gives the seconds left.

        Raises:
            Halt: The deadline passed, or the engine took longer than a turn may.
            Failure: The code raised, or took longer than its limit.
        """
        return _Wait(self, boundary, limit_s)

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


class _Wait:
    """One wait. A context and no function that awaits another: it adds no frame to the stack."""

    __slots__ = ("_boundary", "_guard", "_is_deadline", "_limit_s", "_timeout")

    def __init__(self, guard: Guard, boundary: Boundary, limit_s: float | None) -> None:
        self._guard = guard
        self._boundary: Boundary = boundary
        self._limit_s = limit_s

    async def __aenter__(self) -> float | None:
        guard = self._guard
        guard.boundary, guard.since = self._boundary, time.monotonic()
        left, self._is_deadline = guard.left(self._limit_s)
        if left == 0:
            raise Halt(StopReason.DEADLINE)
        guard.due = None if left is None else guard.since + left
        self._timeout = asyncio.timeout(left)
        await self._timeout.__aenter__()
        return left

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.due = None
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            error = late
        meaning = None if error is None else _meaning(self._boundary, error)
        if meaning is None:
            return
        if isinstance(meaning, Failure) and self._timeout.expired():
            # Whatever the code raised when it was cancelled, the reason is that its time was over.
            if self._is_deadline or self._boundary == "engine":
                raise Halt(StopReason.DEADLINE) from error
            late = TimeoutError(f"{self._boundary}: no answer within {self._limit_s} s")
            raise Failure.of(self._boundary, late) from error
        raise meaning from error
