"""Which functions of the library stand between a call and an engine.

Tasks are counted as if they were calls: with one episode in flight, whatever waits, waits for it. The frames
are those of the thread (the synchronous caller, then the running task), of all waiting tasks, and of the main
thread where the loop runs in another one.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncGenerator, Collection, Iterator
from inspect import CO_COROUTINE
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

import agentenv

LIBRARY = Path(agentenv.__file__).parent


def frames_of_ours(others: Collection[asyncio.Task[Any]] = ()) -> list[str]:
    """Return the library's functions that wait for this call, as `module.function`, outermost first.

    Frames of comprehensions are left out, and so is the caller's own where it is not in the library.

    Args:
        others: tasks that have nothing to do with the call, for example because they were there before.
    """
    stack = list(_frames_below(sys._getframe(1)))
    outer = [frame for frame in stack if not frame.f_code.co_flags & CO_COROUTINE]
    inner = [frame for frame in stack if frame.f_code.co_flags & CO_COROUTINE]
    if threading.current_thread() is not threading.main_thread():
        outer += _frames_below(sys._current_frames()[threading.main_thread().ident])
    waiting = sorted(asyncio.all_tasks() - {asyncio.current_task()} - set(others), key=_number)
    between = [frame for task in waiting for frame in _suspended(task.get_coro())]
    return [_name(frame) for frame in (*reversed(outer), *between, *reversed(inner)) if _is_ours(frame)]


def _frames_below(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _suspended(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine or generator, and of what it awaits, outermost first."""
    while awaited is not None:
        if isinstance(awaited, CoroutineType):
            frame, inner = awaited.cr_frame, awaited.cr_await
        elif isinstance(awaited, AsyncGenerator):
            frame, inner = awaited.ag_frame, awaited.ag_await
        else:
            # `anext` of an asynchronous generator: only the garbage collector knows of which.
            inner = next((one for one in gc.get_referents(awaited) if isinstance(one, AsyncGenerator)), None)
            frame = None
        if frame is not None:
            yield frame
        awaited = inner


def _number(task: asyncio.Task[Any]) -> int:
    """Return a task's number: tasks are named in the order in which they are made."""
    digits = task.get_name().rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def _is_ours(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return LIBRARY in path.parents and not frame.f_code.co_name.endswith("comp>")


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"
