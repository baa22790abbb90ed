"""The bridges between synchronous and asynchronous code, and the threads that they need.

From synchronous code into asynchronous code:

1. `run_sync` runs a coroutine on one private event loop, in one daemon thread per process. Calls that
   belong together (an environment's reset, step and close) meet on the same loop.
2. `run_blocking` runs a coroutine on an event loop of its own, in the calling thread if it can. An
   interrupt cancels the coroutine, and its cleaning up is waited for.

From asynchronous code into synchronous code:

3. `off_loop` runs a function in a thread of a bounded pool, a `ThreadPool`. At most so many calls run at
   once; further ones wait.
4. A call may be abandoned: its thread is named after the call, listed by `abandoned_threads`, no longer
   part of the pool, and asked to stop at the next line of Python it runs.
5. A call that makes further calls from its own thread gets threads beyond the bound, so nesting cannot
   deadlock.
6. All threads are daemons, so that a hung one never keeps the process from ending; idle ones of a pool
   end by themselves. Threads do not survive a fork: they are made anew in the child.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from agentenv.core.errors import EnvironmentMisuse

__all__ = [
    "ThreadCall",
    "ThreadPool",
    "abandoned_threads",
    "blocking",
    "off_loop",
    "run_blocking",
    "run_sync",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")

MAX_THREADS = 256
"""Calls of `off_loop` at once; above it calls wait. A hung call keeps its thread."""
IDLE_S = 10.0


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


def run_blocking(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on a loop of its own; also from inside a running loop, such as a notebook's."""
    return blocking()(coroutine)


def blocking() -> Callable[[Coroutine[Any, Any, _T]], _T]:
    """Return what runs a coroutine from here: `asyncio.run`, or a thread where a loop runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run
    return _run_in_thread


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
            # An interrupt that comes just before a wait begins is noticed only when the wait ends.
            while not wait([future], timeout=1).done:
                pass
            return future.result()
        except KeyboardInterrupt:
            # Only the main thread gets the interrupt, and leaving the block waits for the other one.
            for loop, task in begun:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(task.cancel)
            raise


class _Stop(BaseException):
    """Raised inside an abandoned thread to end it."""


class ThreadCall:
    """One call of a synchronous function: where it runs, and who waits for it."""

    # Invariant: `finished` and `abandoned` are never both true, and change only under `_lock`. So the stop
    # of an abandoned call cannot reach the thread when it already runs another call.

    def __init__(self, function: Callable[[], object], name: str, pool: ThreadPool) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()
        """Settled with the result and None, or with None and what the function raised; never fails itself."""
        self.name = name
        self.started: float | None = None
        """`time.monotonic()` when a thread took the call."""
        self.finished = False
        self.abandoned = False
        self.thread: threading.Thread | None = None
        self.nested = getattr(_inside, "pool", False)
        """The call was made from a thread of a pool."""
        self._function = function
        self._pool = pool
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Run in a thread and hand the outcome to the loop; nothing escapes."""
        with self._lock:
            if self.abandoned:
                return
            self.thread = threading.current_thread()
            self.started = time.monotonic()
        result: Any = None
        error: BaseException | None = None
        try:
            result = self._context.run(self._function)
        except BaseException as raised:  # noqa: BLE001 - a tool may raise anything, SystemExit included
            error = raised
        with self._lock:
            self.finished = not self.abandoned
            if self.abandoned:
                return
        try:
            self._loop.call_soon_threadsafe(self._settle, result, error)
        except RuntimeError:  # the loop has been closed: nobody waits any more
            return

    def _settle(self, result: object, error: BaseException | None) -> None:
        if not self.future.done():
            self.future.set_result((result, error))

    def used_s(self) -> float:
        """Return how long the call has been running; waiting for a thread is no running."""
        return 0.0 if self.started is None or self.finished else time.monotonic() - self.started

    def abandon(self) -> None:
        """Stop waiting for the call; its thread is named, counted and asked to end."""
        with self._lock:
            if self.finished or self.abandoned:
                return
            self.abandoned = True
            thread = self.thread
            if thread is None:
                return
            thread.name = f"abandoned {self._pool.name} {self.name}"
            _abandoned.add(thread)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stop)
            )
        if not self.nested:
            self._pool.lose_thread()


class ThreadPool:
    """Daemon threads for synchronous calls, at most so many at once.

    Args:
        name: of what the calls are, for the names of the threads.
        max_threads: calls that run at once, nested ones not counted.
    """

    # Invariant: `_idle` is the number of threads that wait for a call less the number of calls in `_calls`,
    # so a call is queued without a new thread only if one waits for it or no further one is allowed.
    # One queue for all, and no inbox for each thread: a thread that has just ended a call takes the next
    # one without waking another, which halves the cost of many short calls.

    def __init__(self, name: str, max_threads: int) -> None:
        self.name = name
        self.max_threads = max_threads
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[ThreadCall] = queue.SimpleQueue()
        self._idle = 0
        self._threads = 0

    def submit(self, function: Callable[[], object], name: str) -> ThreadCall:
        """Queue a call; its `future` is settled on the running loop."""
        if self._pid != os.getpid():
            self._begin()
        call = ThreadCall(function, name, self)
        if call.nested:
            # The calling thread is taken until this call ends: waiting for a free one could last for ever.
            thread_name = f"{self.name} {name} (nested)"
            threading.Thread(target=_run_alone, args=(call,), name=thread_name, daemon=True).start()
            return call
        with self._lock:
            if self._idle <= 0 and self._threads < self.max_threads:
                self._start()
            self._idle -= 1
        self._calls.put(call)
        return call

    def lose_thread(self) -> None:
        """Give up the thread of an abandoned call; a waiting call gets a new one."""
        with self._lock:
            self._threads -= 1
            if self._idle < 0:
                self._start()

    def _start(self) -> None:
        self._threads += 1
        self._idle += 1
        threading.Thread(target=self._work, name=f"{self.name} worker", daemon=True).start()

    def _work(self) -> None:
        _inside.pool = True
        try:
            while (call := self._next()) is not None:
                call.run()
                if call.abandoned and call.started is not None:
                    return  # no longer a thread of the pool
                del call  # holds what it was called with
                with self._lock:
                    self._idle += 1
        except _Stop:  # reached the thread after the abandoned call had ended
            return

    def _next(self) -> ThreadCall | None:
        """Return the next call, or None when there was none for a while."""
        try:
            return self._calls.get(timeout=IDLE_S)
        except queue.Empty:
            with self._lock:
                if self._idle > 0:
                    self._idle -= 1
                    self._threads -= 1
                    return None
            return self._calls.get()  # put, or about to be, in the last moment


def _run_alone(call: ThreadCall) -> None:
    _inside.pool = True
    try:
        call.run()
    except _Stop:
        return


def abandoned_threads() -> list[threading.Thread]:
    """Return the threads that still hang in abandoned calls, named after the call."""
    for thread in [thread for thread in _abandoned if not thread.is_alive()]:
        _abandoned.discard(thread)
    return list(_abandoned)


_abandoned: set[threading.Thread] = set()
_inside = threading.local()
_environment_threads = ThreadPool("environment", MAX_THREADS)


async def off_loop(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run a synchronous function in a thread, with the caller's context variables."""
    name = getattr(function, "__name__", type(function).__name__)
    call = _environment_threads.submit(partial(function, *args, **kwargs), name)
    result, error = await call.future
    if error is None:
        return result
    if isinstance(error, StopIteration):
        # Raised here it would end the awaiting coroutine.
        raise RuntimeError(f"{function!r} raised StopIteration") from error  # noqa: TRY004 - not about a type
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        # Raised here it would leave the event loop itself; it is one function that gave up.
        raise RuntimeError(f"{type(error).__name__}: {error}")  # noqa: TRY004 - not about a type
    raise error
