"""Run a job in a confined child: Python code, a command, or a session of both.

The process is trusted until it starts the job and untrusted afterwards, so the init decides the verdict on an
execution. Only the steps of a session are reported by the process itself.
"""

from __future__ import annotations

import _socket
import array
import ast
import atexit
import builtins
import contextlib
import linecache
import marshal
import math
import os
import resource
import signal
import socket
import stat
import sys
import threading
import time
import types
from traceback import print_exception
from typing import Any, NoReturn, cast

from .messages import BEGUN, MAX_DATA_BYTES, REPLY, REPLY_FAILED, REPLY_TIMED_OUT

__all__ = ["lower", "prepare", "serve"]

_NAME = "main.py"
_Job = dict[str, Any]
_SESSION_CPU_S = 3600
"""Processor time limit of a session in seconds. Its steps have time limits of their own, and it is stopped
between them; this limit is for code that the caller lets run on there."""


def prepare() -> None:
    """Set up the streams and built-ins that programs expect; called once, in the zygote."""
    for stream in (sys.stdout, sys.stderr):
        cast("Any", stream).reconfigure(errors="backslashreplace", line_buffering=True)
    builtins.exit = builtins.quit = _exit
    _own_modules.extend(name for name in sys.modules if name == "jail" or name.startswith("jail."))


_own_modules: list[str] = []


def _exit(code: object = None) -> NoReturn:
    raise SystemExit(code)


def lower(wanted: list[tuple[int, int]], slack: int = 0) -> None:
    """Lower resource limits so that they cannot be raised again; a lower existing limit stays."""
    for kind, value in wanted:
        hard = resource.getrlimit(kind)[1]
        most = value + slack if hard == resource.RLIM_INFINITY else min(value + slack, hard)
        resource.setrlimit(kind, (min(value, most), most))


def serve(jobs: int, start: int, limits: dict[str, int]) -> NoReturn:
    """Wait for a job and run it; never returns."""
    names = _fresh()
    channel = _socket.socket(fileno=os.dup(jobs))
    _warm_up()
    job = _receive(channel)
    channel.close()
    if job is None:
        os._exit(0)
    _reseed()
    try:
        _apply(job, limits)
    except (OSError, ValueError) as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="backslashreplace"))
        _begin(start, job, limits)
        os._exit(1)
    _begin(start, job, limits)
    if job["kind"] == "session":
        _session(jobs, names)
    os.close(jobs)
    if job["kind"] == "exec":
        _execute(job)
    _leave(_run(job, names))


def _warm_up() -> None:
    """Use what a job will need, so that the kernel copies the shared memory pages before a job waits."""
    exec(compile(_WARM_UP, _NAME, "exec", dont_inherit=True), {})  # noqa: S102 - three lines of ours
    marshal.loads(marshal.dumps({"kind": "code", "env": {}, "timeout_s": 1.0}, 2))
    BEGUN.pack(b"b", time.monotonic(), math.inf, 0.0, 0.0, 0.0, 0.0, 0.0)
    resource.getrlimit(resource.RLIMIT_CPU)
    sys.stdout.write("")
    sys.stdout.flush()


_WARM_UP = """
def f(n):
    return [str(i) for i in range(n)]
f(3)
"""


def _receive(channel: _socket.socket) -> _Job | None:
    """Return the next job, or None if the host has closed the channel."""
    data, fds = _receive_with_files(channel)
    if fds:
        with open(fds[0], "rb") as file:
            data = file.read()
    return marshal.loads(data) if data else None


def _receive_with_files(channel: _socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, _, _ = channel.recvmsg(1 << 18, socket.CMSG_SPACE(4))
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def _begin(start: int, job: _Job, limits: dict[str, int]) -> None:
    """Tell the init that the job starts now, and its limits."""
    limit_s = math.inf if job["timeout_s"] is None else job["timeout_s"]
    terms = BEGUN.pack(
        b"b",
        time.monotonic(),
        limit_s,
        limits["memory_bytes"],
        2 * limits["work_bytes"],
        resource.getrlimit(resource.RLIMIT_CPU)[0],
        limits["max_processes"],
        limits["max_file_bytes"],
    )
    os.write(start, terms)
    os.close(start)


def _apply(job: _Job, limits: dict[str, int]) -> None:
    """Apply the job's own limits, environment, files and input."""
    job_limits: dict[str, int] = job.get("limits") or {}
    for name in job_limits.keys() & limits.keys():
        limits[name] = min(job_limits[name], limits[name])
    if job_limits:
        lower(
            [
                (resource.RLIMIT_AS, limits["address_space_bytes"]),
                (resource.RLIMIT_NOFILE, limits["max_open_files"]),
                (resource.RLIMIT_FSIZE, limits["max_file_bytes"]),
                (resource.RLIMIT_NPROC, limits["max_processes"]),
            ]
        )
    timeout_s: float | None = job["timeout_s"]
    cpu_s = _SESSION_CPU_S if timeout_s is None else max(limits["cpu_s"], int(2 * timeout_s) + 1)
    lower([(resource.RLIMIT_CPU, cpu_s)], slack=1)
    os.environ.update(job.get("env") or {})
    for name, data in (job.get("files") or {}).items():
        _write(name, data)
    if job.get("stdin"):
        path = os.path.join(os.environ["TMPDIR"], ".stdin")
        _write(path, job["stdin"])
        fd = os.open(path, os.O_RDONLY)
        os.unlink(path)
        os.dup2(fd, 0)
        os.close(fd)


def _write(name: str, data: bytes) -> None:
    if folder := os.path.dirname(name):
        os.makedirs(folder, exist_ok=True)
    with open(name, "wb") as file:
        file.write(data)


def _reseed() -> None:
    """Reseed numpy's generator if it was loaded before the fork, since all children would share its state."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))


def _fresh() -> dict[str, Any]:
    """Return the namespace of a new `__main__` module."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=_NAME, __builtins__=builtins)
    sys.modules["__main__"] = module
    for name in _own_modules:
        sys.modules.pop(name, None)
    sys.argv = [_NAME]
    sys.path.insert(0, os.getcwd())
    return module.__dict__


def _run(job: _Job, names: dict[str, Any]) -> int:
    """Run code as Python runs a script; return the exit code."""
    source = job["code"]
    linecache.cache[_NAME] = (len(source), None, source.splitlines(True), _NAME)
    try:
        for piece in _compile(source, echo=bool(job.get("echo"))):
            exec(piece, names)  # noqa: S102 - running this code is the purpose of the process
    except SystemExit as request:
        return _exit_code(request.code)
    except BaseException as error:  # noqa: BLE001 - the program's error is printed as Python prints it
        _show(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _compile(source: str, *, echo: bool) -> list[types.CodeType]:
    """Compile a script; with `echo`, the value of its last expression is printed as at Python's prompt."""
    if not echo:
        return [compile(source, _NAME, "exec", dont_inherit=True)]
    tree = ast.parse(source, _NAME)
    pieces: list[types.CodeType] = []
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    pieces.append(compile(tree, _NAME, "exec", dont_inherit=True))
    if last is not None:
        pieces.append(compile(ast.Interactive([last]), _NAME, "single", dont_inherit=True))
    return pieces


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr or sys.__stderr__)
    return 1


def _show(error: BaseException) -> None:
    """Print a traceback without this file's frames, with the program's `sys.excepthook` if it set one."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename != _NAME:
        traceback = traceback.tb_next
    error = error.with_traceback(traceback)
    if sys.excepthook is not sys.__excepthook__:
        try:
            sys.excepthook(type(error), error, traceback)
        except BaseException:  # noqa: BLE001, S110 - a broken hook must not hide the failure
            pass
        else:
            return
    print_exception(error, file=sys.stderr or sys.__stderr__)


def _leave(code: int) -> NoReturn:
    """End the process as Python does: wait for threads, run exit handlers and flush the streams."""
    try:
        cast("Any", threading)._shutdown()  # noqa: SLF001
        cast("Any", atexit)._run_exitfuncs()  # noqa: SLF001
    except BaseException as error:  # noqa: BLE001 - the program's handlers
        code = _exit_code(error.code) if isinstance(error, SystemExit) else code or 1
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception:  # noqa: BLE001 - replaced by the program
            code = code or 120
    os._exit(code)


def _execute(job: _Job) -> NoReturn:
    """Replace this process by a command."""
    command: list[str] = job["command"]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, os.environ)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        os.write(2, f"{command[0]}: {reason}\n".encode(errors="backslashreplace"))
        os._exit(126 if isinstance(error, PermissionError) else 127)


def _session(jobs: int, names: dict[str, Any]) -> NoReturn:
    """Run one job after another in the same process and directory."""
    os.set_inheritable(jobs, False)
    _reply(jobs, {"id": 0})
    while True:
        channel = _socket.socket(fileno=os.dup(jobs))
        job = _receive(channel)
        channel.close()
        if job is None:
            os._exit(0)
        began = time.monotonic()
        reply: _Job = {"id": job["id"]}
        try:
            _step(job, names, reply)
        except OSError as error:
            reply |= {"flags": REPLY_FAILED, "data": (error.strerror or str(error)).encode(errors="replace")}
        _flush()
        reply["duration_s"] = time.monotonic() - began
        _reply(jobs, reply)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed or replaced by the program
            stream.flush()


def _reply(jobs: int, reply: _Job) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    head = REPLY.pack(
        reply["id"],
        reply.get("exit", 0),
        reply.get("flags", 0),
        reply.get("duration_s", 0.0),
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024,
    )
    with socket.socket(fileno=os.dup(jobs)) as channel:
        channel.send(head + reply.get("data", b""))


def _step(job: _Job, names: dict[str, Any], reply: _Job) -> None:
    """Run one job of a session and add what came of it to the reply."""
    kind = job["kind"]
    if kind == "code":
        reply["exit"] = _run(job, names)
    elif kind == "exec":
        _command(job, reply)
    elif kind == "write":
        _write(job["path"], job["data"])
    elif kind == "read":
        reply["data"] = _read(job["path"], job["at"])


def _read(path: str, at: int) -> bytes:
    """Return a part of a file; it ends before `MAX_DATA_BYTES` only at the end of the file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("it is not a regular file")
        return os.pread(fd, MAX_DATA_BYTES, at)
    finally:
        os.close(fd)


def _command(job: _Job, reply: _Job) -> None:
    """Run a command as a child process with its own time limit; the session goes on after it."""
    import subprocess

    environment = {**os.environ, **(job.get("env") or {})}
    try:
        process = subprocess.Popen(  # noqa: S603 - running this command is the purpose of the process
            job["command"],
            env=environment,
            stdin=subprocess.PIPE if job.get("stdin") else subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        os.write(2, f"{job['command'][0]}: {error.strerror}\n".encode(errors="backslashreplace"))
        reply["exit"] = 126 if isinstance(error, PermissionError) else 127
        return
    try:
        process.communicate(job.get("stdin") or None, timeout=job["timeout_s"])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reply |= {"exit": -9, "flags": REPLY_TIMED_OUT}
        return
    reply["exit"] = process.returncode
