"""Exceptions that code from outside the library raises: which of them must pass, and how to describe them.

An environment, a reward, a user or a tool may raise anything: an exception whose `__str__` raises, or a
`CancelledError`, `GeneratorExit` or `SystemExit` of its own. That is a failure of this code only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

__all__ = ["class_of", "first_line_of", "frames_of", "is_foreign", "message_of", "must_pass", "traceback_of"]

OUR_FRAMES = 3
"""Largest number of the library's frames below the first foreign one in a traceback."""
_NO_SIGNALS = (
    "signals work in the main thread alone, and synchronous tools, rewards and methods run in others: make "
    "it async def, which `agentenv eval` runs in the main thread, or a tool with isolated=True"
)
_OURS = str(Path(__file__).parents[1]) + os.sep
_STANDARD = str(Path(os.__file__).parent) + os.sep


def must_pass(error: BaseException) -> bool:
    """Return whether an exception ends the program or the running task, and is not the failure of some code.

    These are an interrupt by the user (Ctrl-C), a cancellation of the running task, and the `GeneratorExit`
    with which Python closes a coroutine.
    """
    kind = type(error)
    if _is_interrupt(error):
        return True
    if not issubclass(kind, (asyncio.CancelledError, GeneratorExit)):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs
        task = None
    # A coroutine that is being closed does not run in a task. In a task, some code raised the exception.
    # `cancelling()` counts the requests to cancel the task. Without one, some code raised the exception, for
    # example because it awaited a task that it had cancelled.
    return task is None or (issubclass(kind, asyncio.CancelledError) and task.cancelling() > 0)


def class_of(error: BaseException) -> str:
    """Return the name of an exception's class."""
    return _told(lambda: type(error).__name__, "Exception")


def message_of(error: BaseException) -> str:
    """Return the text of an exception, also if its `__str__` raises, and what helps where signals failed."""
    text = _told(lambda: str(error), f"<str() of this {class_of(error)} failed>")
    signals = issubclass(type(error), ValueError) and ("in main thread" in text or "signal.alarm()" in text)
    return f"{_NO_SIGNALS} ({text})" if signals else text


def first_line_of(error: BaseException) -> str:
    """Return the first line with text of an exception's message; its class if the message is empty."""
    return next(filter(str.strip, message_of(error).splitlines()), "") or class_of(error)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception as text; only its class and message if it cannot be formatted.

    It begins with the first frame of the code that the library called, such as a tool or a reward, and shows
    at most `OUR_FRAMES` frames of the library below it. It is the whole traceback if the logger `agentenv`
    is set to DEBUG, as `--debug` does, or if all frames are the library's.
    """

    def describe() -> str:
        told = traceback.TracebackException.from_exception(error)
        if not _shows_all():
            _shorten(told)
        return "".join(told.format())

    return _told(describe, f"{class_of(error)}: {message_of(error)}")


def frames_of(error: BaseException) -> TracebackType | None:
    """Return an exception's frames from the first of the code that the library called; else all of them."""
    frames = error.__traceback__
    while frames is not None and not is_foreign(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return error.__traceback__ if frames is None or _shows_all() else frames


def is_foreign(file: str) -> bool:
    """Return whether a frame's file is neither of this library nor of the standard library."""
    return not file.startswith((_OURS, "<")) and ("site-packages" in file or not file.startswith(_STANDARD))


def _shows_all() -> bool:
    return logging.getLogger("agentenv").isEnabledFor(logging.DEBUG)


def _shorten(told: traceback.TracebackException | None) -> None:
    """Leave the library's frames out of the traceback of an exception, and of those of its causes."""
    if told is None:
        return
    first = next((at for at, frame in enumerate(told.stack) if is_foreign(frame.filename)), None)
    if first is not None:
        below = told.stack[first:]
        ours = [at for at, frame in enumerate(below) if frame.filename.startswith(_OURS)]
        told.stack[:] = [frame for at, frame in enumerate(below) if at not in ours[:-OUR_FRAMES]]
    _shorten(told.__cause__)
    _shorten(told.__context__)


def _told(describe: Callable[[], str], instead: str) -> str:
    """Return a description that the exception's own code may write, as an exact `str`."""
    try:
        # A subclass of `str` could have methods that raise later.
        return str.__str__(describe())
    except BaseException as raised:
        if _is_interrupt(raised):
            raise
        return instead


def _is_interrupt(error: BaseException) -> bool:
    """Return whether the user interrupts the program; Python raises that in the main thread only."""
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and issubclass(type(error), KeyboardInterrupt)
