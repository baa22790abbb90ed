"""Threads for sync tools: a bounded pool that a hung tool cannot clog.

1. At most `max_threads` calls run at once; further ones wait, and waiting costs them no time limit.
2. A call over its limit is abandoned: its thread is named after the tool, counted, no longer part
   of the pool, and asked to stop at the next line of Python it runs.
3. A tool that runs tools from its own thread gets threads beyond the bound, so nesting cannot
   deadlock.
4. Threads are daemons: a hung tool never keeps the process from ending. Idle ones end by
   themselves.
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import queue
import threading
import time
from asyncio import AbstractEventLoop, Future, get_running_loop
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Job", "WorkerPool", "abandoned_threads", "default_pool"]

MAX_THREADS = 64
"""Sync calls that run at once; tools mostly wait, so more than the machine has cores."""
MAX_ABANDONED = 64
"""Hung threads after which sync calls are refused: something is wrong and memory is finite."""
IDLE_S = 10.0


class _Stop(BaseException):
    """Raised inside an abandoned thread to end it."""


class Job:
    """One sync call: what runs, where it runs, and who waits for it."""

    def __init__(
        self, function: Callable[[], object], name: str, loop: AbstractEventLoop, on_lost: Callable[[], None]
    ) -> None:
        self.future: Future[Any] = loop.create_future()
        self.name = name
        self.started: float | None = None
        """`time.monotonic()` when a thread took the job."""
        self.finished = False
        self.abandoned = False
        self.thread: threading.Thread | None = None
        self._function = function
        self._loop = loop
        self._on_lost = on_lost
        self.nested = getattr(_inside, "worker", False)
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Run in a worker thread and hand the outcome to the loop; nothing escapes."""
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
            self.finished = True
            if self.abandoned:
                return
        try:
            self._loop.call_soon_threadsafe(self._settle, result, error)
        except RuntimeError:  # the loop has been closed: nobody waits any more
            return

    def _settle(self, result: object, error: BaseException | None) -> None:
        if self.future.done():
            return
        self.future.set_result((result, error))

    def used_s(self) -> float:
        """Return how long the call has been running; waiting for a thread is no running."""
        return 0.0 if self.started is None or self.finished else time.monotonic() - self.started

    def abandon(self) -> None:
        """Stop waiting for the job; its thread is named, counted and asked to end."""
        if self.finished or self.abandoned:
            return
        with self._lock:
            if self.finished:
                return
            self.abandoned = True
            thread = self.thread
            if thread is None:
                return
            thread.name = f"abandoned tool {self.name}"
            _abandoned.add(thread)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stop)
            )
        if not self.nested:
            self._on_lost()


class WorkerPool:
    """A pool of daemon threads for sync calls."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self.max_threads = max_threads
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._idle: list[queue.SimpleQueue[Job]] = []
        self._threads = 0

    def submit(self, function: Callable[[], object], name: str) -> Job:
        """Queue a call; `job.future` gives `(result, exception)` on the running loop.

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
        job = Job(function, name, get_running_loop(), self._lose_thread)
        if job.nested:
            threading.Thread(
                target=_run_alone, args=(job,), name=f"tool {name} (nested)", daemon=True
            ).start()
            return job
        with self._lock:
            if self._idle:
                self._idle.pop().put(job)
            elif self._threads < self.max_threads:
                self._start(job)
            else:
                self._waiting.append(job)
        return job

    def _start(self, job: Job) -> None:
        self._threads += 1
        threading.Thread(target=self._work, args=(job,), name="tool worker", daemon=True).start()

    def _lose_thread(self) -> None:
        """Give up the thread of an abandoned job; a waiting call gets a new one."""
        with self._lock:
            self._threads -= 1
            if self._waiting:
                self._start(self._waiting.popleft())

    def _work(self, job: Job | None) -> None:
        _inside.worker = True
        inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        try:
            while job is not None:
                job.run()
                if job.abandoned and job.started is not None:
                    return  # no longer a thread of the pool
                job = self._next(inbox)
        except _Stop:  # reached the thread after the abandoned call had ended
            return

    def _next(self, inbox: queue.SimpleQueue[Job]) -> Job | None:
        """Return the next job, or None when there was none for a while."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._idle.append(inbox)
        try:
            return inbox.get(timeout=IDLE_S)
        except queue.Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    self._threads -= 1
                    return None
            return inbox.get()  # handed over in the last moment


def _run_alone(job: Job) -> None:
    _inside.worker = True
    try:
        job.run()
    except _Stop:
        return


def abandoned_threads() -> list[threading.Thread]:
    """Return the threads that still hang in tools over their time limit, named after the tool."""
    for thread in [thread for thread in _abandoned if not thread.is_alive()]:
        _abandoned.discard(thread)
    return list(_abandoned)


def default_pool() -> WorkerPool:
    """Return the pool of this process; it is made anew after a fork."""
    if _pools.get("pid") != os.getpid():
        _pools.update(pid=os.getpid(), pool=WorkerPool())
        _abandoned.clear()
    return _pools["pool"]


_abandoned: set[threading.Thread] = set()
_inside = threading.local()
_pools: dict[str, Any] = {}
