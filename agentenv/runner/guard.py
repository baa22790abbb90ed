"""Await code from outside the runner under time limits, and decide what its errors mean for the episode.

An episode can stop (`Halt`), fail (`Failure`), or be cancelled by the program. Rules:

1. If infrastructure fails (the engine, a sandbox, a server of tools or of an environment, or the engine of a
   judge or simulated user), the stop reason is `aborted`. If code of an environment, reward, parser or user
   fails, it is `error`.
2. If the engine refuses a prompt as too long, the episode stops. This is not a failure and not retried.
3. Only a real cancellation of the running task and the user's interrupt (Ctrl-C) pass through. Whatever else
   the guarded code raises is a failure, also a `CancelledError`, `GeneratorExit` or `SystemExit` of its own,
   and an exception that cannot be printed.
4. The episode stops at its deadline, and when the engine exceeds the time limit of a turn. Any other code
   that exceeds its limit has failed. Time in which the event loop was held up counts towards no limit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, TypeAlias

from agentenv.core.episode_env import Context
from agentenv.core.errors import (
    AlignmentError,
    ContextTooLong,
    EngineUnavailable,
    InfrastructureError,
    SandboxCrashed,
    SandboxError,
    ServerUnavailable,
)
from agentenv.core.faults import class_of, message_of, must_pass, traceback_of
from agentenv.core.threads import end_copy
from agentenv.core.trajectory import EpisodeError, StopReason
from agentenv.runner.fair_timeout import FairTimeout

__all__ = ["Boundary", "Failure", "Guard", "Halt", "at"]

Boundary: TypeAlias = Literal[
    "env", "tool", "engine", "reward", "parser", "sandbox", "user", "render", "agent"
]
"""Part of the system whose code was running."""

_PASSING = (EngineUnavailable, SandboxCrashed, ServerUnavailable)
"""Failures that another attempt may not meet."""

_LIMITS: Mapping[Boundary, str] = {
    "env": "env_timeout_s",
    "user": "env_timeout_s",
    "agent": "env_timeout_s",
    "reward": "reward_timeout_s",
}
"""The limit of the run that is named to who waited for such code too long."""

MAX_MESSAGE_CHARS = 4_000
MAX_TRACEBACK_CHARS = 20_000


class Halt(Exception):
    """The episode stops for a reason that is not a failure."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Failure(Exception):
    """The episode failed. It is recorded with its cause and never trained."""

    def __init__(self, reason: StopReason, error: EpisodeError) -> None:
        super().__init__(error.message)
        self.reason = reason
        self.error = error

    @classmethod
    def of(cls, boundary: Boundary, error: BaseException) -> Failure:
        """Classify an exception by its type and by whose code raised it."""
        kind = type(error)
        reason, retryable = StopReason.ERROR, False
        if issubclass(kind, InfrastructureError):
            boundary = "sandbox" if issubclass(kind, SandboxError) else boundary
            reason, retryable = StopReason.ABORTED, issubclass(kind, _PASSING)
        elif boundary in {"engine", "sandbox"}:
            # Another attempt may return complete logprobs, so an AlignmentError of the engine is retried.
            reason, retryable = StopReason.ABORTED, issubclass(kind, (OSError, TimeoutError, AlignmentError))
        # The end of a traceback names the cause; the beginning are frames of ours.
        text = traceback_of(error)[-MAX_TRACEBACK_CHARS:]
        message = message_of(error)[:MAX_MESSAGE_CHARS]
        return cls(reason, EpisodeError(boundary, class_of(error), message, text, retryable))


def _meaning(boundary: Boundary, error: BaseException) -> Halt | Failure | None:
    """Return the `Halt` or `Failure` that an exception causes; None if it must propagate unchanged."""
    kind = type(error)
    if issubclass(kind, (Halt, Failure)) or must_pass(error):
        return None
    if boundary == "engine" and issubclass(kind, ContextTooLong):
        return Halt(StopReason.CONTEXT_LENGTH)
    return Failure.of(boundary, error)


class at:
    """Turns every exception of the guarded code into a `Halt` or a `Failure`; it sets no time limit."""

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
    """Guards every wait of one episode, and shows the watchdog what the episode waits for.

    Args:
        context: holds the episode's deadline.
    """

    # Invariant: an episode waits for one thing at a time, so one set of fields describes its wait.
    __slots__ = ("_context", "boundary", "current", "due", "pid", "since")

    def __init__(self, context: Context) -> None:
        self._context = context
        self.pid = os.getpid()
        """The process that plays the episode."""
        self.boundary: Boundary = "env"
        """Part of the system that the episode waits for."""
        self.since = time.monotonic()
        """Time at which the wait began, by `time.monotonic()`."""
        self.due: float | None = None
        """Time at which the wait must be over; None without a limit, and between waits."""
        self.current: _Wait | None = None
        """The wait; None between waits."""

    def waiting(self, boundary: Boundary, limit_s: float | None) -> _Wait:
        """Return the context in which to await outside code; entering it returns the seconds left.

        Raises:
            Halt: The deadline has passed, or the engine exceeded the time limit of a turn.
            Failure: The code raised an exception, or exceeded its time limit.
        """
        return _Wait(self, boundary, limit_s)

    @contextmanager
    def other_episode(self) -> Generator[None]:
        """Let only the deadline limit the current wait: its code awaits an episode with limits of its own."""
        wait = self.current
        if wait is None or wait.timeout is None:
            yield
            return
        self._limit(wait, None)
        try:
            yield
        finally:
            self._limit(wait, wait.limit_s)

    def _limit(self, wait: _Wait, limit_s: float | None) -> None:
        """Give a wait another time limit from now on."""
        timeout = wait.timeout
        # A timeout that has expired cannot be moved; the cancellation is on its way already.
        if timeout is None or timeout.expired():
            return
        left, wait.is_deadline = self.left(limit_s)
        self.since = time.monotonic()
        self.due = None if left is None else self.since + left
        timeout.reschedule(left)

    def put_off(self, seconds: float) -> None:
        """Note that the event loop was late, so that the wait has more time."""
        self.due = None if self.due is None else self.due + seconds

    def left(self, limit_s: float | None, *, spent: bool = False) -> tuple[float | None, bool]:
        """Return the seconds that a wait may take, and whether the episode's deadline sets them.

        Args:
            limit_s: time limit of the wait itself.
            spent: subtract the time since the current wait began from `limit_s`.
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
    """One wait. It is a context manager, not a function that awaits, so it adds no frame to the stack."""

    __slots__ = ("_boundary", "_guard", "is_deadline", "limit_s", "timeout")

    def __init__(self, guard: Guard, boundary: Boundary, limit_s: float | None) -> None:
        self._guard = guard
        self._boundary: Boundary = boundary
        self.limit_s = limit_s
        self.timeout: FairTimeout | None = None

    async def __aenter__(self) -> float | None:
        guard = self._guard
        # First, because the watchdog names whatever is set here if anything below hangs.
        guard.boundary, guard.since = self._boundary, time.monotonic()
        left, self.is_deadline = guard.left(self.limit_s)
        # `asyncio.timeout(0)` would let the code run up to its first await.
        if left == 0:
            raise Halt(StopReason.DEADLINE)
        guard.due = None if left is None else guard.since + left
        self.timeout = None if left is None else FairTimeout(left, guard.put_off)
        if self.timeout is not None:
            await self.timeout.__aenter__()
        guard.current = self
        return left

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_copy(self._guard.pid, error)
        # Before anything can raise: a wait that is over must never look hung.
        self._guard.due = self._guard.current = None
        timeout = self.timeout
        if timeout is not None:
            try:
                await timeout.__aexit__(kind, error, trace)
            except TimeoutError as late:
                error = late
        # `error` may be the timeout by now, and `must_pass` tells it from a cancellation by the program.
        meaning = None if error is None else _meaning(self._boundary, error)
        if meaning is None:
            return
        if timeout is not None and timeout.expired() and isinstance(meaning, Failure):
            # The timeout cancelled the code; whatever the code raised then, the cause is the timeout.
            if self.is_deadline or self._boundary == "engine":
                raise Halt(StopReason.DEADLINE) from error
            named = f" (limits.{_LIMITS[self._boundary]})" if self._boundary in _LIMITS else ""
            late = TimeoutError(f"{self._boundary}: no answer within {self.limit_s} s{named}")
            raise Failure.of(self._boundary, late) from error
        raise meaning from error
