"""The event loops on which synchronous code runs coroutines. `agentenv.core.threads` is the other way.

1. `run_sync` runs a coroutine on one private event loop, in one daemon thread per process. Calls that
   belong together (an environment's reset, step and close) meet on the same loop. The loop does not survive
   a fork; the child process starts a new one.
2. `run_blocking` runs a coroutine on an event loop of its own, in the calling thread if it can. An
   interrupt cancels the coroutine, and its cleaning up is waited for.

Nobody but the program's own code has these coroutines, so a cancellation that comes out of one was made by
code that it ran, such as a tool that cancels all tasks of the loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

from agentenv.core.errors import EnvironmentMisuse

__all__ = ["LoopThread", "blocking", "cancelled_within", "run_blocking", "run_sync"]

_T = TypeVar("_T")


class LoopThread:
    """One event loop in one daemon thread; it belongs to the process that created it.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on this loop and await it from another; cancelling the wait cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def stop(self) -> None:
        """Cancel what still runs on the loop, and end the thread."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


_lock = threading.Lock()
_loop_thread: LoopThread | None = None


def _private_loop() -> LoopThread:
    global _loop_thread  # noqa: PLW0603 - one loop per process is the point
    with _lock:
        if _loop_thread is None or _loop_thread.pid != os.getpid():
            _loop_thread = LoopThread("agentenv-loop")
        return _loop_thread


def run_sync(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on the private loop and return its result; this blocks the calling thread only.

    Raises:
        EnvironmentMisuse: The caller runs on the private loop, which would wait for itself.
    """
    private = _private_loop()
    if threading.current_thread() is private.thread:
        coroutine.close()
        raise EnvironmentMisuse(
            "a synchronous call was made from asynchronous code on agentenv's own loop",
            remedy="await the asynchronous method instead",
        )
    future = asyncio.run_coroutine_threadsafe(coroutine, private.loop)
    try:
        return future.result()
    except concurrent.futures.CancelledError as error:
        raise cancelled_within() from error
    except BaseException:
        future.cancel()
        raise


def run_blocking(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on a new event loop. This also works inside a running loop, as in a notebook."""
    try:
        return blocking()(coroutine)
    except asyncio.CancelledError as error:
        raise cancelled_within() from error


def blocking() -> Callable[[Coroutine[Any, Any, _T]], _T]:
    """Return a function that runs a coroutine: `asyncio.run`, or a thread's if a loop already runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return import_module("agentenv.core.interrupts").run_ignoring
        return asyncio.run
    return _run_in_thread


def cancelled_within() -> EnvironmentMisuse:
    """Return the error that tells of a coroutine that code has cancelled which ran in it."""
    return EnvironmentMisuse(
        "what ran was cancelled from within: code of an environment, a tool or a reward has cancelled tasks "
        "of the event loop that it did not make",
        remedy="let it cancel its own tasks only; finished episodes are kept, and the run can be resumed",
    )


def _run_in_thread(coroutine: Coroutine[Any, Any, _T]) -> _T:
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def run() -> _T:
        task = asyncio.current_task()
        assert task is not None
        begun.append((asyncio.get_running_loop(), task))
        return await coroutine

    with ThreadPoolExecutor(1) as thread:
        try:
            future = thread.submit(asyncio.run, run())
            # An interrupt that arrives just before a wait begins is noticed only when the wait ends, so
            # each wait is short.
            while not wait([future], timeout=1).done:
                pass
            return future.result()
        except KeyboardInterrupt:
            # Only the main thread gets the interrupt, and leaving the `with` block waits for the other
            # thread, so its task must be cancelled.
            for loop, task in begun:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(task.cancel)
            raise
