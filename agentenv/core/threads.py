"""The threads in which asynchronous code runs synchronous functions. `agentenv.core.loops` is the other way.

1. `off_loop` runs a function in a thread of a `ThreadPool`. The pool limits how many calls run at the same
   time; further calls wait.
2. A call may be abandoned. Its thread then leaves the pool, is named after the call, is listed by
   `abandoned_threads`, and is asked to stop at the next line of Python that it runs.
3. A call made from a thread of a pool gets a thread beyond the limit, so nested calls cannot deadlock.
4. An object that only its own thread may use, such as a SQLite connection, needs all later calls in the
   thread that made it. A call may therefore keep its thread: it leaves the pool as an `OwnThread`.
5. A call may fork. The copy of this process ends where the call ends in it: what comes after belongs to the
   run, whose files, sockets and event loop the copy shares.
6. All threads are daemons, so that a hung thread never keeps the process from ending. Idle threads of a
   pool end by themselves. Threads do not survive a fork; the child process starts new ones.

Threads, connections and pipes all take open files, of which `open_files_left` says how many there are.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "LARGE_CHARS",
    "OwnThread",
    "ThreadCall",
    "ThreadPool",
    "abandoned_threads",
    "beside_loop",
    "end_copy",
    "off_loop",
    "open_files_left",
    "own_thread",
    "to_its_end",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")

MAX_THREADS = 256
"""Number of `off_loop` calls that run at the same time; further calls wait. A hung call keeps its thread."""
LARGE_CHARS = 100_000
"""Texts of this size are worked on beside the event loop; on it, a tenth of a second would pass."""
IDLE_S = 10.0


class _Stop(BaseException):
    """Raised inside an abandoned thread to end it."""


class ThreadCall:
    """One call of a synchronous function in a thread, with a future for the caller."""

    # Invariant: `finished` and `abandoned` are never both true, and change only under `_lock`. Therefore the
    # exception that stops an abandoned call cannot hit the thread while it runs another call.

    def __init__(self, function: Callable[[], object], name: str, pool: ThreadPool | OwnThread) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self.future: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()
        """Future of `(result, None)` or `(None, exception)`. The future itself never has an exception."""
        self.name = name
        self.started: float | None = None
        """`time.monotonic()` at which a thread took the call; None until then."""
        self.finished = False
        self.abandoned = False
        self.thread: threading.Thread | None = None
        self.nested = getattr(_inside, "pool", False)
        """True if the call was made from a thread of a pool."""
        self._function = function
        self._pool = pool
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Run the function in this thread and pass its outcome to the loop; never raises."""
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
        end_copy(self._pid, error)
        with self._lock:
            self.finished = not self.abandoned
            if self.abandoned:
                return
        try:
            self._loop.call_soon_threadsafe(self._settle, result, error)
        except RuntimeError:  # the loop is closed, so nobody waits for the outcome
            return

    def _settle(self, result: object, error: BaseException | None) -> None:
        if not self.future.done():
            self.future.set_result((result, error))

    def used_s(self) -> float:
        """Return for how many seconds the call has run; waiting for a thread does not count."""
        return 0.0 if self.started is None or self.finished else time.monotonic() - self.started

    def abandon(self) -> None:
        """Stop waiting for the call. Its thread is renamed, listed as abandoned and asked to end."""
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
    """A bounded number of daemon threads for synchronous calls.

    Args:
        name: kind of calls, such as "tool"; part of the names of the threads.
        max_threads: largest number of calls that run at the same time, without nested calls.
    """

    # Invariant: `_idle` is the number of waiting threads minus the number of calls in `_calls`, so a call
    # is queued without a new thread only if a thread waits for it or the pool is at its limit.
    # All threads share one queue. A thread that has just finished a call takes the next one without waking
    # another thread, which halves the cost of many short calls.

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
        """Queue a call; its `future` belongs to the running loop."""
        if self._pid != os.getpid():
            self._begin()
        call = ThreadCall(function, name, self)
        if call.nested:
            # The calling thread is busy until this call ends, so waiting for a free one could deadlock.
            _start_alone(call, f"{self.name} {name} (nested)")
            return call
        with self._lock:
            if self._idle <= 0 and self._threads < self.max_threads:
                self._start()
            self._idle -= 1
        self._calls.put(call)
        return call

    def lose_thread(self) -> None:
        """Remove the thread of an abandoned call from the pool; a waiting call gets a new thread."""
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
                    return  # this thread no longer belongs to the pool
                if (own := getattr(_inside, "own", None)) is not None:
                    del call
                    self.lose_thread()
                    own.serve()
                    return
                del call  # it would keep the arguments alive while the thread is idle
                with self._lock:
                    self._idle += 1
        except _Stop:  # it arrived after the abandoned call had ended
            return

    def _next(self) -> ThreadCall | None:
        """Return the next call, or None if there was none for `IDLE_S` seconds."""
        try:
            return self._calls.get(timeout=IDLE_S)
        except queue.Empty:
            with self._lock:
                if self._idle > 0:
                    self._idle -= 1
                    self._threads -= 1
                    return None
            return self._calls.get()  # `submit` has counted on this thread, so a call is on its way


class OwnThread:
    """The thread of a pool that was kept by a call, for later calls that must run in it.

    The call that runs in the thread makes this object by `keep`.
    """

    name = "kept"

    def __init__(self) -> None:
        self.alive = True
        """False once the thread was closed or hangs in an abandoned call."""
        self._pid = os.getpid()
        self._calls: queue.SimpleQueue[ThreadCall | None] = queue.SimpleQueue()

    @classmethod
    def keep(cls) -> OwnThread | None:
        """Keep the calling thread when its call has ended; None if it is not a thread of a pool."""
        if not getattr(_inside, "pool", False):
            return None
        _inside.own = cls()
        return _inside.own

    @property
    def usable(self) -> bool:
        """Whether calls can run in the thread; a forked child does not have it."""
        return self.alive and self._pid == os.getpid()

    def submit(self, function: Callable[[], object], name: str) -> ThreadCall:
        """Queue a call; its `future` belongs to the running loop."""

        def outside() -> object:
            # What the function calls must not wait for this thread, which is busy.
            own_thread.set(None)
            return function()

        call = ThreadCall(outside, name, self)
        call.nested = False
        self._calls.put(call)
        return call

    def lose_thread(self) -> None:
        """Note that the thread hangs in an abandoned call; the calls that wait for it run without it."""
        self.alive = False
        with suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    _start_alone(call, f"{self.name} {call.name} (alone)")

    def close(self) -> None:
        """End the thread after the calls that are queued."""
        self.alive = False
        self._calls.put(None)

    def serve(self) -> None:
        """Run the calls, in the thread that was kept."""
        threading.current_thread().name = "environment with a thread of its own"
        while (call := self._calls.get()) is not None:
            call.run()
            if call.abandoned and call.started is not None:
                return
            del call


own_thread: contextvars.ContextVar[OwnThread | None] = contextvars.ContextVar("agentenv_thread", default=None)
"""The thread in which synchronous functions must run; None means any thread of a pool."""


def _start_alone(call: ThreadCall, thread_name: str) -> None:
    threading.Thread(target=_run_alone, args=(call,), name=thread_name, daemon=True).start()


def _run_alone(call: ThreadCall) -> None:
    _inside.pool = True
    try:
        call.run()
        if (own := getattr(_inside, "own", None)) is not None:
            own.serve()
    except _Stop:
        return


def end_copy(pid: int, error: BaseException | None) -> None:
    """End this process if it is a copy that foreign code has made by a fork; otherwise do nothing.

    Args:
        pid: id of the process that called the code.
        error: what the code raised, if anything.
    """
    if os.getpid() == pid:
        return
    code = error.code if isinstance(error, SystemExit) else int(error is not None)
    # Without cleaning up: exit handlers, buffers and open files are those of the run.
    os._exit(code if isinstance(code, int) else int(code is not None))


def open_files_left() -> int | None:
    """Return how many more files this process may open; None if nothing limits it.

    The limit is first raised to the highest that the process may set itself (`ulimit -Hn`).
    """
    try:
        import resource
    except ImportError:  # a system without such limits
        return None
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != most:
        with suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            limit = most
    return None if limit == resource.RLIM_INFINITY else max(0, limit - len(os.listdir("/dev/fd")))  # noqa: PTH208 - names are enough


def abandoned_threads() -> list[threading.Thread]:
    """Return the threads that still hang in abandoned calls; each is named after its call."""
    for thread in [thread for thread in _abandoned if not thread.is_alive()]:
        _abandoned.discard(thread)
    return list(_abandoned)


_abandoned: set[threading.Thread] = set()
_inside = threading.local()
_environment_threads = ThreadPool("environment", MAX_THREADS)
_own_threads = ThreadPool("large texts", 4)


async def off_loop(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run a synchronous function in a thread, with the caller's context variables."""
    name = getattr(function, "__name__", type(function).__name__)
    own = own_thread.get()
    pool = _environment_threads if own is None or not own.usable else own
    call = pool.submit(partial(function, *args, **kwargs), name)
    result, error = await call.future
    if error is None:
        return result
    if isinstance(error, StopIteration):
        # Raising StopIteration here would end the awaiting coroutine.
        raise RuntimeError(f"{function!r} raised StopIteration") from error  # noqa: TRY004 - not about a type
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        # Raising these here would end the event loop, although only one function failed.
        raise RuntimeError(f"{type(error).__name__}: {error}")  # noqa: TRY004 - not about a type
    raise error


async def to_its_end(pool: ThreadPool, function: Callable[[], _T], name: str) -> _T:
    """Run a function in a thread; cancellations wait for its end, however often they come.

    What the function changes is whole then, for whoever reads it next.
    """
    call = pool.submit(function, name)
    try:
        result, error = await asyncio.shield(call.future)
    except asyncio.CancelledError:
        while not call.future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([call.future])
        raise
    if error is not None:
        raise error
    return result


async def beside_loop(size: int, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run a function of this library, in a thread if its input is large, so that others go on meanwhile.

    Args:
        size: characters of the input; from `LARGE_CHARS` on, a thread runs the function to its end.
        function: the function.
        args: its arguments.
        kwargs: its arguments with names.
    """
    if size < LARGE_CHARS:
        return function(*args, **kwargs)
    work = partial(function, *args, **kwargs)
    return await to_its_end(_own_threads, work, getattr(function, "__name__", "work"))
