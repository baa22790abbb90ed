"""Run a tool's function once, within its time limit, and never let it take the process down.

1. The wait ends at the limit, whatever the function does: a coroutine is cancelled, a thread is
   abandoned. Time in the queue for a thread, and time in which the event loop itself was blocked,
   does not count.
2. `SystemExit`, `KeyboardInterrupt` and every other exception of the function come back as values.
   Failures of sandbox and engine are not the tool's: they pass through and abort the episode.
3. When the caller is cancelled, so is the call.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.errors import EngineError, SandboxError, ToolError
from agentenv.messages import ContentPart, ToolErrorKind
from agentenv.toolcall.content import to_content
from agentenv.toolcall.workers import default_pool

__all__ = ["Outcome", "failure", "run_async", "run_sync", "timed_out", "wait_for"]

_GRACE_S = 1.0
"""How long a cancelled coroutine may clean up before it is abandoned."""
_LAG_S = 0.05
"""A timer this late means that the loop was blocked; the call gets the lost time back."""
_DETAIL_CHARS = 8000
_SHOWN_CHARS = 300

_abandoned_tasks: set[asyncio.Task[Any]] = set()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of running a tool's function."""

    content: str | list[ContentPart]
    error_kind: ToolErrorKind | None = None
    detail: str = ""


def failure(error: BaseException) -> Outcome:
    """Return the outcome of an exception: short for the model, with its traceback for the record.

    Raises:
        SandboxError, EngineError: Infrastructure failed, not the tool.
    """
    if isinstance(error, SandboxError | EngineError):
        raise error
    if isinstance(error, ToolError):
        return Outcome(str(error) or "the tool failed", ToolErrorKind.TOOL_ERROR)
    text = " ".join(str(error).split())
    if len(text) > _SHOWN_CHARS:
        text = text[: _SHOWN_CHARS - 3] + "..."
    name = type(error).__name__
    detail = "".join(traceback.format_exception(error, limit=-20))[-_DETAIL_CHARS:]
    return Outcome(f"{name}: {text}" if text else name, ToolErrorKind.EXCEPTION, detail)


def timed_out(limit_s: float) -> Outcome:
    """Return the outcome of a call that took longer than its limit."""
    return Outcome(f"timeout: the tool took longer than {limit_s:g} s and was stopped", ToolErrorKind.TIMEOUT)


async def run_async(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], limit_s: float | None
) -> Outcome:
    """Run a coroutine function on the loop."""
    task = asyncio.create_task(_guarded(function, args, kwargs))
    try:
        finished = await wait_for(task, limit_s)
    except asyncio.CancelledError:
        await _stop(task)
        raise
    if not finished:
        await _stop(task)
        assert limit_s is not None
        return timed_out(limit_s)
    result, error = task.result()
    return failure(error) if error is not None else _converted(result)


async def run_sync(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    limit_s: float | None,
    name: str,
) -> Outcome:
    """Run a plain function in a worker thread; its result is converted there too."""

    def call() -> object:
        result = function(*args, **kwargs)
        return result if inspect.isawaitable(result) else _converted(result)

    try:
        job = default_pool().submit(call, name)
    except RuntimeError as error:
        return failure(error)
    remaining = limit_s
    try:
        while not await wait_for(job.future, remaining):
            assert limit_s is not None
            used = 0.0 if job.started is None else time.monotonic() - job.started
            remaining = limit_s - used
            if job.finished:
                remaining = None  # its answer is on the way to the loop
            elif remaining <= 0:
                job.abandon()
                return timed_out(limit_s)
    except asyncio.CancelledError:
        job.abandon()
        raise
    result, error = job.future.result()
    if error is not None:
        return failure(error)
    if inspect.isawaitable(result):
        return await run_async(_awaited, (result,), {}, limit_s)
    return result


async def _awaited(result: Any) -> Any:
    return await result


async def _guarded(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, BaseException | None]:
    """Await the function; asyncio would let SystemExit and KeyboardInterrupt end the loop."""
    try:
        return await function(*args, **kwargs), None
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return None, error
    except BaseException as error:  # noqa: BLE001 - a tool may raise anything
        return None, error


def _converted(result: object) -> Outcome:
    try:
        return Outcome(to_content(result))
    except Exception as error:  # noqa: BLE001 - the boundary of a tool: its result may hold anything
        return failure(error)


async def wait_for(future: asyncio.Future[Any], limit_s: float | None) -> bool:
    """Wait until the future is done, at most the limit; return False at the limit."""
    if limit_s is None:
        await asyncio.wait({future})
        return True
    loop = asyncio.get_running_loop()
    left = max(limit_s, 0.0)
    while True:
        due = loop.time() + left
        await asyncio.wait({future}, timeout=left)
        if future.done():
            return True
        left = loop.time() - due
        if left < _LAG_S:
            return False


async def _stop(task: asyncio.Task[Any]) -> None:
    """Cancel a task and let it clean up; one that refuses is kept in sight and left behind."""
    task.cancel()
    _abandoned_tasks.add(task)
    task.add_done_callback(_forget)
    await asyncio.wait({task}, timeout=_GRACE_S)


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned_tasks.discard(task)
    if not task.cancelled():
        task.exception()
