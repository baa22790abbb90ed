"""The two bridges between synchronous and asynchronous code.

- `run_sync` runs a coroutine for a synchronous caller, on one private event loop in one daemon
  thread per process. The thread is made anew after a fork.
- `off_loop` runs a synchronous function for an asynchronous caller, in a daemon thread. A thread
  that hangs is abandoned: it cannot keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from agentenv.core.errors import EnvironmentMisuse

__all__ = ["off_loop", "run_sync"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

MAX_THREADS = 256
"""Synchronous calls at once; above it calls wait. A hung call keeps its place."""


class _LoopThread:
    """One event loop in one daemon thread; belongs to the process that made it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="agentenv-loop", daemon=True)
        self.thread.start()


_lock = threading.Lock()
_loop_thread: _LoopThread | None = None


def _private_loop() -> _LoopThread:
    global _loop_thread  # noqa: PLW0603 - one loop per process is the point
    with _lock:
        if _loop_thread is None or _loop_thread.pid != os.getpid():
            _loop_thread = _LoopThread()
        return _loop_thread


def run_sync(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end and return its result; blocks the calling thread only.

    Raises:
        EnvironmentMisuse: Called from the private loop itself, which would wait for itself.
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
    except BaseException:
        future.cancel()
        raise


class _Workers:
    """Daemon threads that wait for work; made when needed, kept for the next call."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._guard = threading.Lock()
        self._idle = 0
        self._threads = 0

    def submit(self, job: Callable[[], None]) -> None:
        with self._guard:
            if self._idle > 0:
                self._idle -= 1
            elif self._threads < MAX_THREADS:
                self._threads += 1
                threading.Thread(
                    target=self._serve, name=f"agentenv-worker-{self._threads}", daemon=True
                ).start()
            else:
                self._idle -= 1
        self._work.put(job)

    def _serve(self) -> None:
        while True:
            self._work.get()()
            with self._guard:
                self._idle += 1


_workers = _Workers()


async def off_loop(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run a synchronous function in a worker thread, with the caller's context variables."""
    global _workers  # noqa: PLW0603 - threads do not survive a fork
    if _workers.pid != os.getpid():
        _workers = _Workers()
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()
    context = contextvars.copy_context()

    def job() -> None:
        try:
            result = context.run(function, *args, **kwargs)
        except StopIteration as error:
            # A future cannot carry StopIteration: it would end the awaiting coroutine.
            failure = RuntimeError(f"{function!r} raised StopIteration")
            failure.__cause__ = error
            _deliver(loop, future, None, failure)
        except BaseException as error:  # noqa: BLE001 - carried to the caller as it is
            _deliver(loop, future, None, error)
        else:
            _deliver(loop, future, result, None)

    _workers.submit(job)
    return await future


def _deliver(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: object, error: BaseException | None
) -> None:
    def settle() -> None:
        if future.done():
            return
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            # Would leave the event loop itself; here it is one function that gave up.
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        # The loop was closed while the call ran: nobody waits for the result.
        return
