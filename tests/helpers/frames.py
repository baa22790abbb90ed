"""Which functions of ours are live between an entry and the place where this is asked.

A task's frames are added to those of whoever waits for it, so a hop into another task does not hide
what lies above it.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import agentenv

OURS = str(Path(agentenv.__file__).parent)


def live_functions(others: Collection[asyncio.Task[Any]] = ()) -> list[str]:
    """Names of our functions that are live: in this task, in the tasks beside it and in the main thread.

    Args:
        others: tasks that have nothing to do with the entry, for example because they were there before.
    """
    here = asyncio.current_task()
    frames = list(_called(sys._getframe(1)))
    for task in asyncio.all_tasks() - {here} - set(others):
        frames += _awaited(task.get_coro())
    if threading.current_thread() is not threading.main_thread():
        frames += _called(sys._current_frames()[threading.main_thread().ident])
    return [
        frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name
        for frame in frames
        if frame.f_code.co_filename.startswith(OURS)
    ]


def _called(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _awaited(awaitable: Any) -> Iterator[FrameType]:
    """Frames of a suspended coroutine or asynchronous generator and of what it awaits."""
    while awaitable is not None:
        if inspect.iscoroutine(awaitable):
            frame, following = awaitable.cr_frame, awaitable.cr_await
        elif inspect.isasyncgen(awaitable):
            frame, following = awaitable.ag_frame, awaitable.ag_await
        elif inspect.isgenerator(awaitable):
            frame, following = awaitable.gi_frame, awaitable.gi_yieldfrom
        else:
            # What `async for` awaits does not name its generator, but refers to it.
            frame = None
            following = next((one for one in gc.get_referents(awaitable) if inspect.isasyncgen(one)), None)
        if frame is not None:
            yield frame
        awaitable = following
