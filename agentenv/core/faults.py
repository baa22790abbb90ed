"""Exceptions that code from outside the library raises: which of them must pass, and how to describe them.

An environment, a reward, a user or a tool may raise anything: an exception whose `__str__` raises, or a
`CancelledError`, `GeneratorExit` or `SystemExit` of its own. That is a failure of this code only.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

__all__ = ["class_of", "first_line_of", "message_of", "must_pass", "traceback_of"]


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
    """Return the text of an exception, also if its `__str__` raises."""
    return _told(lambda: str(error), f"<str() of this {class_of(error)} failed>")


def first_line_of(error: BaseException) -> str:
    """Return the first line with text of an exception's message; its class if the message is empty."""
    return next(filter(str.strip, message_of(error).splitlines()), "") or class_of(error)


def traceback_of(error: BaseException, frames: TracebackType | None = None, limit: int | None = None) -> str:
    """Return the traceback of an exception as text; only its class and message if it cannot be formatted.

    Args:
        error: the exception.
        frames: the frames to show; None means those of the exception.
        limit: number of frames to show, as in the module `traceback`.
    """
    shown = error.__traceback__ if frames is None else frames
    return _told(
        lambda: "".join(traceback.format_exception(type(error), error, shown, limit=limit)),
        f"{class_of(error)}: {message_of(error)}",
    )


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
