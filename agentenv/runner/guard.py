"""Where an exception crossed into the runner, and what that makes of the episode.

An episode ends in one of three ways, and each is data: it comes to a stop (`Halt`), it fails
(`Failure`), or the program cancels it. Rules:

1. Infrastructure (engine, sandbox, a judge's or simulated user's engine) makes an episode
   `aborted`; code of an environment, reward, parser or user makes it `error`.
2. A prompt that the engine refuses as too long is a stop, never a failure and never retried.
3. Only a real cancellation of the running task passes through; a `CancelledError` or `SystemExit`
   that the guarded code raised by itself is a failure like any other.
"""

from __future__ import annotations

import asyncio
import traceback
from types import TracebackType
from typing import Literal, TypeAlias

from agentenv.core.errors import (
    AlignmentError,
    ContextTooLong,
    EngineError,
    EngineUnavailable,
    SandboxCrashed,
    SandboxError,
)
from agentenv.core.trajectory import EpisodeError, StopReason

__all__ = ["Boundary", "Failure", "Halt", "at"]

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


class at:
    """Turn whatever the guarded code raises into a `Halt` or a `Failure`."""

    __slots__ = ("_boundary",)

    def __init__(self, boundary: Boundary) -> None:
        self._boundary: Boundary = boundary

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (Halt, Failure, GeneratorExit, KeyboardInterrupt)):
            return
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                return
        if isinstance(error, ContextTooLong) and self._boundary == "engine":
            raise Halt(StopReason.CONTEXT_LENGTH) from error
        raise Failure.of(self._boundary, error) from error
