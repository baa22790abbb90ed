"""Run a tool's function once, within its time limit, so that it cannot end the process.

1. The wait ends at the time limit, whatever the function does: a coroutine is cancelled, a thread is
   abandoned. Time spent waiting for a thread, and time in which the event loop was blocked, does not count.
2. `SystemExit`, `KeyboardInterrupt` and every other exception of the function are returned as values.
   Failures of infrastructure (a sandbox, an engine, a server) are not the tool's: they are raised, and abort
   the episode.
3. If the caller is cancelled, the call is cancelled too.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.core.errors import InfrastructureError, ToolError
from agentenv.core.faults import class_of, message_of, must_pass, traceback_of
from agentenv.core.messages import ContentPart, ToolErrorKind
from agentenv.core.threads import ThreadCall, ThreadPool, abandoned_threads, end_copy, own_thread
from agentenv.tools.content import to_content

__all__ = [
    "EXPIRED",
    "ToolOutcome",
    "abandoned_threads",
    "failure",
    "in_thread",
    "run_coroutine",
    "run_function",
    "timed_out",
    "within",
]

MAX_ABANDONED = 64
"""Number of hung threads above which calls are refused, because each of them keeps its memory."""
_GRACE_S = 1.0
"""Seconds that a cancelled coroutine may take to clean up before it is abandoned."""
_LAG_S = 0.05
"""Seconds of delay of a timer that show that the loop was blocked; the call then gets that time back."""
_MAX_FORGIVEN = 5
"""Number of times that a call gets time back, so that a loop that always lags cannot extend it forever."""
_DETAIL_CHARS = 8000
_SHOWN_CHARS = 300

EXPIRED = object()
"""Result of `within` if the time limit was reached."""

_abandoned_tasks: set[asyncio.Task[Any]] = set()
_threads = ThreadPool("tool", 64)
"""Threads for tools. Tools mostly wait, so more of them may run than the machine has cores."""


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The outcome of running a tool's function."""

    content: str | list[ContentPart]
    error_kind: ToolErrorKind | None = None
    detail: str = ""


def failure(error: BaseException) -> ToolOutcome:
    """Return the outcome of an exception: a short text for the model and the traceback for the record.

    Raises:
        InfrastructureError: The exception says that infrastructure failed, not the tool.
    """
    if isinstance(error, InfrastructureError):
        raise error
    if isinstance(error, ToolError):
        told = error.args[0] if error.args and isinstance(error.args[0], list) else message_of(error)
        detail = traceback_of(error)[-_DETAIL_CHARS:] if error.__cause__ is not None else ""
        return ToolOutcome(to_content(told or "the tool failed"), ToolErrorKind.TOOL_ERROR, detail)
    text = " ".join(message_of(error).split())
    if len(text) > _SHOWN_CHARS:
        text = text[: _SHOWN_CHARS - 3] + "..."
    name = class_of(error)
    detail = traceback_of(error)[-_DETAIL_CHARS:]
    return ToolOutcome(f"{name}: {text}" if text else name, ToolErrorKind.EXCEPTION, detail)


def timed_out(limit_s: float) -> ToolOutcome:
    """Return the outcome of a call that took longer than its limit."""
    return ToolOutcome(
        f"timeout: the tool took longer than {limit_s:g} s and was stopped", ToolErrorKind.TIMEOUT
    )


async def run_coroutine(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], limit_s: float | None
) -> ToolOutcome:
    """Run a coroutine function on the running event loop."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()
    task = loop.create_task(_guarded(function, args, kwargs, answer))
    start = loop.time()
    try:
        settled = await within(answer, limit_s, lambda: loop.time() - start)
    except asyncio.CancelledError:
        await _stop(task)
        raise
    if settled is EXPIRED:
        await _stop(task)
        return timed_out(limit_s or 0.0)
    result, error = settled
    return failure(error) if error is not None else _converted(result)


async def run_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    limit_s: float | None,
    name: str,
) -> ToolOutcome:
    """Run a synchronous function in a thread, where its result is also converted."""

    def call() -> object:
        result = function(*args, **kwargs)
        return result if inspect.isawaitable(result) else _converted(result)

    try:
        job = in_thread(call, name)
    except RuntimeError as error:
        return failure(error)
    try:
        settled = await within(job.future, limit_s, job.used_s)
    except asyncio.CancelledError:
        job.abandon()
        raise
    if settled is EXPIRED:
        job.abandon()
        return timed_out(limit_s or 0.0)
    result, error = settled
    if error is not None:
        return failure(error)
    if inspect.isawaitable(result):
        return await run_coroutine(_awaited, (result,), {}, limit_s)
    return result


def in_thread(function: Callable[[], object], name: str) -> ThreadCall:
    """Queue a call for the threads that all tools share.

    Raises:
        RuntimeError: Too many threads hang in tools that never returned.
    """
    hanging = abandoned_threads()
    if len(hanging) >= MAX_ABANDONED:
        names = sorted({thread.name for thread in hanging})
        raise RuntimeError(
            f"{len(hanging)} threads hang in tools that never returned ({', '.join(names[:3])}); "
            "give those tools isolated=True, so that they run in a process that can be killed"
        )
    own = own_thread.get()
    return (_threads if own is None or not own.usable else own).submit(function, name)


async def within(answer: asyncio.Future[Any], limit_s: float | None, used_s: Callable[[], float]) -> Any:
    """Await an answer for at most the limit.

    Args:
        answer: Future that the call sets; this function sets it to `EXPIRED` at the limit.
        limit_s: Seconds that the call may use; None means no limit.
        used_s: Function that returns the seconds that the call has used so far.
    """
    if limit_s is None:
        return await answer
    loop = asyncio.get_running_loop()
    forgiven = 0

    def check(due: float) -> None:
        nonlocal timer, forgiven
        if answer.done():
            return
        now = loop.time()
        left, late = limit_s - used_s(), now - due
        if late >= _LAG_S and forgiven < _MAX_FORGIVEN:
            left, forgiven = max(left, late), forgiven + 1
        if left <= 0:
            answer.set_result(EXPIRED)
        else:
            timer = loop.call_at(now + left, check, now + left)

    due = loop.time() + limit_s
    timer = loop.call_at(due, check, due)
    try:
        return await answer
    finally:
        timer.cancel()


async def _awaited(result: Any) -> Any:
    return await result


async def _guarded(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], answer: asyncio.Future[Any]
) -> None:
    """Await the function and catch everything, because SystemExit would end asyncio's loop."""
    result: Any = None
    failed: BaseException | None = None
    pid = os.getpid()
    try:
        result = await function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - a tool may raise anything, also CancelledError of its own
        failed = error
    end_copy(pid, failed)
    if not answer.done():
        answer.set_result((result, failed))


def _converted(result: object) -> ToolOutcome:
    try:
        return ToolOutcome(to_content(result))
    except BaseException as error:  # the boundary of a tool: its result may hold anything
        if must_pass(error):
            raise
        return failure(error)


async def _stop(task: asyncio.Task[Any]) -> None:
    """Cancel a task and let it clean up; a task that does not end in time is no longer awaited."""
    task.cancel()
    _abandoned_tasks.add(task)
    task.add_done_callback(_abandoned_tasks.discard)
    await asyncio.wait({task}, timeout=_GRACE_S)
