"""Run isolated tools in worker processes, which can be killed whatever the tool does.

1. A worker process serves one function, one call at a time, and is kept for the next call.
2. The worker receives the function's location and the arguments as JSON and answers in JSON. Nothing is
   pickled, and the processes share nothing but files and sockets.
3. At the time limit the worker and everything that it started are killed. The time that a worker needs to
   start does not count.
4. A process beside the worker reads a pipe whose other end only the parent holds, and kills the worker when
   the parent ends, whatever the function does then. The worker's processor time is limited, too.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agentenv.core import errors
from agentenv.core.messages import ToolErrorKind
from agentenv.tools.run import EXPIRED, ToolOutcome, failure, in_thread, timed_out, within

__all__ = ["FunctionPath", "close_idle_workers", "loading", "run_isolated"]

MAX_IDLE = 4
"""Number of idle worker processes that are kept for the next call, for all functions together."""
START_S = 60.0
"""Number of seconds that a new worker may take to import the function's module."""

loading = threading.Event()
"""Set in a worker process while it imports the function's module."""


@dataclass(frozen=True, slots=True)
class FunctionPath:
    """Location from which another process can import a function."""

    module: str
    file: str
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., object]) -> FunctionPath:
        """Return the location of a function that is defined in a module."""
        return cls(function.__module__, function.__code__.co_filename, function.__qualname__)


class _Worker:
    """One worker process. Its methods block, so they are called in a thread of the tools' pool."""

    def __init__(self, path: FunctionPath) -> None:
        self.path = path
        theirs, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", "agentenv.tools.process_main", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(theirs)

    def start(self) -> None:
        """Let the process import the function's module.

        Raises:
            RuntimeError: The process cannot import the module or find the function in it.
        """
        timer = threading.Timer(START_S, self.kill)
        timer.start()
        try:
            reply = self._ask({"path": sys.path, **asdict(self.path)})
        finally:
            timer.cancel()
        if reply is None or "failed" in reply:
            reason = reply["failed"] if reply else f"it ended, or took more than {START_S:g} s to start"
            raise RuntimeError(
                f"the process for {self.path.module}.{self.path.qualname} cannot run: {reason}"
            )

    def call(self, arguments: str, limit_s: float | None) -> dict[str, Any] | None:
        """Return the answer to one call, or None if the process ended."""
        return self._ask({"arguments": arguments, "limit_s": limit_s})

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def kill(self) -> None:
        """End the process and everything it started; may be called from any thread, and twice."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> int:
        """Kill the process, close its pipes and return its exit status."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return self._process.wait()


class _Call:
    """One call of an isolated tool: the worker that runs it, and when it started."""

    def __init__(self, path: FunctionPath, arguments: str, limit_s: float | None) -> None:
        self._asked: float | None = None
        self._place = path
        self._arguments = arguments
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._stopped = False

    def run(self) -> ToolOutcome:
        """Run the call in an idle or new worker; called in a thread."""
        worker = _take(self._place)
        fresh = worker is None
        worker = worker or _Worker(self._place)
        with self._lock:
            self._worker = worker
            if self._stopped:
                worker.kill()
        try:
            if fresh:
                worker.start()
            self._asked = time.monotonic()
            reply = worker.call(self._arguments, self._limit_s)
        except BaseException:
            worker.close()
            raise
        with self._lock:
            self._worker = None
        if reply is None or self._stopped:
            status = worker.close()
            return ToolOutcome(f"the tool's process ended with status {status}", ToolErrorKind.EXCEPTION)
        _give_back(worker)
        return _outcome(reply)

    def used_s(self) -> float:
        """Return for how many seconds the worker has been running the call."""
        return 0.0 if self._asked is None else time.monotonic() - self._asked

    def stop(self) -> None:
        """Kill the worker, even if it is still starting."""
        with self._lock:
            self._stopped = True
            if self._worker is not None:
                self._worker.kill()


async def run_isolated(path: FunctionPath, arguments: str, limit_s: float | None, name: str) -> ToolOutcome:
    """Call a function in a worker process.

    Args:
        path: Location of the function.
        arguments: Arguments of the call as JSON text.
        limit_s: Time limit in seconds, counted from the moment at which the process receives the call.
        name: Name of the tool; it becomes part of the name of the waiting thread.
    """
    if loading.is_set():
        return failure(
            RuntimeError(
                f"tool {name} is isolated, but its module calls it while the module is being imported; "
                "put the code that starts the run under: if __name__ == '__main__':"
            )
        )
    session = _Call(path, arguments, limit_s)
    try:
        job = in_thread(session.run, name)
    except RuntimeError as error:
        return failure(error)
    try:
        settled = await within(job.future, limit_s, lambda: 0.0 if job.finished else session.used_s())
    except asyncio.CancelledError:
        session.stop()
        raise
    if settled is EXPIRED:
        session.stop()
        return timed_out(limit_s or 0.0)
    outcome, error = settled
    return failure(error) if error is not None else outcome


def close_idle_workers() -> None:
    """End the idle worker processes."""
    with _idle_lock:
        workers = _idle.pop(os.getpid(), [])
    for worker in workers:
        worker.close()


def _take(path: FunctionPath) -> _Worker | None:
    with _idle_lock:
        waiting = _idle.get(os.getpid(), [])
        for worker in waiting:
            if worker.path == path:
                waiting.remove(worker)
                return worker
    return None


def _give_back(worker: _Worker) -> None:
    with _idle_lock:
        waiting = _idle.setdefault(os.getpid(), [])
        waiting.append(worker)
        surplus = waiting.pop(0) if len(waiting) > MAX_IDLE else None
    if surplus is not None:
        surplus.close()


def _outcome(reply: Mapping[str, Any]) -> ToolOutcome:
    infrastructure = reply.get("raise")
    if infrastructure:
        raise getattr(errors, infrastructure)(reply["text"])
    kind = reply["error_kind"]
    return ToolOutcome(reply["content"], ToolErrorKind(kind) if kind else None, reply["detail"])


_idle: dict[int, list[_Worker]] = {}
"""Idle workers by the id of the process that started them, so that a forked child does not use its
parent's."""
_idle_lock = threading.Lock()
atexit.register(close_idle_workers)
