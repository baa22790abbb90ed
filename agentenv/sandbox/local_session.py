"""A session in the jail: one worker that takes one step after another."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from agentenv.errors import SandboxCrashed, UsageError
from agentenv.sandbox import checks
from agentenv.sandbox.base import ExecResult, SandboxLimits
from agentenv.sandbox.output import Output
from agentenv.sandbox.pool import Pool, Worker
from agentenv.sandbox.running import Lost, Verdict, pack, send, settle

__all__ = ["LocalSession"]

_GRACE_S = 2.0
_START_S = 30.0
_MAX_READ_BYTES = 32 << 20


class LocalSession:
    """State kept between calls; see `Session`."""

    def __init__(
        self,
        start: Callable[[], Awaitable[Pool]],
        gate: asyncio.Semaphore,
        limits: SandboxLimits,
        files: Mapping[str, bytes],
    ) -> None:
        self._start = start
        self._gate = gate
        self._limits = limits
        self._files = dict(files)
        self._worker: Worker | None = None
        self._starting = asyncio.Lock()
        self._one_at_a_time = asyncio.Lock()
        self._count = 0
        self._why = ""
        self._current: _Step | None = None
        self.closed = False

    @property
    def alive(self) -> bool:
        """False once the process has ended, or before the start."""
        return self._worker is not None and not self._why

    @property
    def ended(self) -> bool:
        """True once the process has ended, for whatever reason."""
        return self.closed or bool(self._why)

    async def __aenter__(self) -> Self:
        """Start the process."""
        await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        await self.close()

    async def _begin(self) -> None:
        if self.closed:
            raise UsageError("the session is closed; open a new one")
        async with self._starting:
            if self._worker is None and not self._why:
                pool = await self._start()
                self._worker = await pool.take()
                job = {"kind": "session", "timeout_s": None, "files": self._files, "env": {}}
                result, _, _ = await self._exchange(job, _START_S, 0)
                if result.status != "ok":
                    raise SandboxCrashed(f"a session could not be started: {result.note} {result.stderr}")

    async def run_code(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        files: Mapping[str, str | bytes] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        limits: SandboxLimits | None = None,
        echo: bool = False,
    ) -> ExecResult:
        """Run Python code in the session's process; names and files stay.

        `env`, `stdin` and `limits` belong to the process and cannot change between its steps.
        """
        if env or stdin is not None or limits is not None:
            raise UsageError(
                "a session's code has the session's environment, input and limits; leave them out"
            )
        job: dict[str, object] = {"kind": "code", "code": checks.clean_code(code), "echo": echo}
        return await self._run(job, timeout_s, files)

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        files: Mapping[str, str | bytes] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Run a command in the session's directory; a time-out ends the command only."""
        if limits is not None:
            raise UsageError("a session's commands have the session's limits; leave them out")
        job: dict[str, object] = {"kind": "exec", "command": checks.clean_command(cmd)}
        job["env"] = checks.clean_environment(env)
        job["stdin"] = b"" if stdin is None else checks.as_bytes(stdin, "stdin")
        return await self._run(job, timeout_s, files)

    async def _run(
        self, job: dict[str, object], timeout_s: float | None, files: Mapping[str, str | bytes] | None
    ) -> ExecResult:
        timeout_s = checks.clean_timeout(timeout_s, self._limits.timeout_s)
        job["timeout_s"] = timeout_s
        clean = checks.clean_files(files)
        if (size := sum(map(len, clean.values())) + len(pack(job))) > checks.MAX_JOB_BYTES:
            return checks.oversized(size)
        for path, data in clean.items():
            await self.write_file(path, data)
        await self._begin()
        asked = asyncio.get_running_loop().time()
        async with self._one_at_a_time, self._gate:
            began = asyncio.get_running_loop().time()
            result = await self._step(
                job, timeout_s + (_GRACE_S if job["kind"] == "exec" else 0.0), timeout_s
            )
        return replace(result[0], queue_s=began - asked)

    async def read_file(self, path: str) -> bytes:
        """Return a file of the session's directory."""
        result, fd = await self._file({"kind": "read", "path": checks.clean_path(path)})
        if fd == -1:
            raise FileNotFoundError(f"no file {path!r} in the session's working directory: {result}")
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FileNotFoundError(f"{path!r} is no regular file")
            with open(fd, "rb", closefd=False) as file:  # noqa: ASYNC230 - a regular file, in memory
                return file.read(_MAX_READ_BYTES)
        finally:
            os.close(fd)

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Put a file into the session's directory."""
        content = checks.as_bytes(data, f"file {path!r}")
        if len(content) > checks.MAX_JOB_BYTES:
            raise UsageError(f"file {path!r} has {len(content):,} bytes; at most {checks.MAX_JOB_BYTES:,}")
        reason, _ = await self._file({"kind": "write", "path": checks.clean_path(path), "data": content})
        if reason:
            raise OSError(f"file {path!r} cannot be written in the sandbox: {reason}")

    async def _file(self, job: dict[str, object]) -> tuple[str, int]:
        """Move a file; return why it failed, and the descriptor that came back."""
        await self._begin()
        async with self._one_at_a_time:
            result, reason, fd = await self._step(job, self._limits.timeout_s, self._limits.timeout_s)
        return reason or ("" if result.status == "ok" else result.note), fd

    async def _step(
        self, job: dict[str, object], wait_s: float, timeout_s: float
    ) -> tuple[ExecResult, str, int]:
        """Send one job and wait for its reply, the process's end, or the time limit."""
        if self._worker is None or self._why:
            note = f"the session has ended ({self._why or 'closed'}) and its state is lost; open a new one"
            return ExecResult(status="killed", stderr=note + "\n", note=note), note, -1
        self._count += 1
        return await self._exchange({**job, "id": self._count, "timeout_s": timeout_s}, wait_s, self._count)

    async def _exchange(
        self, job: Mapping[str, object], wait_s: float, number: int
    ) -> tuple[ExecResult, str, int]:
        assert self._worker is not None
        worker, limit_s = self._worker, job["timeout_s"]
        timeout_s = float(limit_s) if isinstance(limit_s, int | float) else wait_s
        step = self._current = _Step(worker, self._limits, number)
        try:
            send(worker, pack(job))
            async with asyncio.timeout(wait_s):
                await step.done
        except TimeoutError:
            step.reason = "timeout"
        except Lost:
            step.reason = "lost"
        except asyncio.CancelledError:
            self._end("a step was cancelled")
            raise
        finally:
            step.stop()
            self._current = None
            if self._why:
                worker.close()
        return self._settle(step, timeout_s), str(step.reply.get("failed", "")), step.fd

    def _settle(self, step: _Step, timeout_s: float) -> ExecResult:
        reply = step.reply
        ended = bool(step.reason) or not reply
        reason = step.reason or ("" if reply else "lost")
        verdict = Verdict(
            exit=_whole(reply.get("exit", 0)) if reply else -9,
            reason=reason if ended else str(reply.get("reason", "")),
            duration_s=float(_number(reply.get("duration_s"), step.elapsed())),
            cpu_s=float(_number(reply.get("cpu_s"), 0.0)),
            max_rss_bytes=_whole(reply.get("max_rss_bytes", 0)),
        )
        if reason == "lost":
            verdict = step.verdict() or verdict
        result = settle(verdict, step.out, step.err, timeout_s, self._limits)
        if ended:
            self._end(result.note or f"its process ended with exit code {result.exit_code}")
            note = f"{self._why}; the session has ended and its state is lost"
            status = "killed" if result.status in ("ok", "error") else result.status
            result = replace(result, status=status, note=note, files=None)
        return replace(result, files=None)

    def _end(self, why: str) -> None:
        self._why = self._why or why
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.kill()
        if self._current is None:
            worker.close()
        else:  # the step in flight still listens; it closes the worker when it has stopped
            self._current.end()

    async def close(self) -> None:
        """End the process and everything that it started; may be called twice."""
        self.closed = True
        self._end("closed")


def _number(value: object, default: float) -> float:
    """Read a number that the confined process gave."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _whole(value: object) -> int:
    return int(_number(value, 0))


class _Step:
    """One job of a session in flight."""

    def __init__(self, worker: Worker, limits: SandboxLimits, number: int) -> None:
        self.worker = worker
        self.limits = limits
        self.number = number
        self.out, self.err = Output(limits.output_bytes), Output(limits.output_bytes)
        self.status = bytearray()
        self.reply: dict[str, object] = {}
        self.reason = ""
        self.fd = -1
        self.loop = asyncio.get_running_loop()
        self.began = self.loop.time()
        self.done: asyncio.Future[None] = self.loop.create_future()
        for fd, take in (
            (worker.out, self._output),
            (worker.err, self._output),
            (worker.status, self._ended),
        ):
            os.set_blocking(fd, False)
            self.loop.add_reader(fd, take, fd)
        self.loop.add_reader(worker.job.fileno(), self._replied)

    def elapsed(self) -> float:
        return self.loop.time() - self.began

    def _output(self, fd: int) -> None:
        output = self.out if fd == self.worker.out else self.err
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.loop.remove_reader(fd)
            return
        output.add(data)
        if output.total > self.limits.max_output_bytes:
            self.reason = self.reason or "output_limit"
            self._finish()

    def _ended(self, fd: int) -> None:
        data = os.read(fd, 1 << 16)
        if data:
            self.status += data
            return
        self.loop.remove_reader(fd)
        self._finish()

    def _replied(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.worker.job, 1 << 16, 4)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        for extra in fds[1:]:
            os.close(extra)
        if not data:
            self.loop.remove_reader(self.worker.job.fileno())
        try:
            reply = json.loads(data)
        except ValueError:
            reply = None
        if isinstance(reply, dict) and reply.get("id") == self.number and not self.reply:
            self.reply, self.fd = reply, fds[0] if fds else -1
            self._finish()
        elif fds:
            os.close(fds[0])

    def end(self) -> None:
        """Stop waiting for a reply: the process is gone."""
        self.reason = self.reason or "lost"
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def verdict(self) -> Verdict | None:
        """What the init said about the process, if it has ended."""
        try:
            return Verdict.parse(bytes(self.status))
        except Lost:
            return None

    def stop(self) -> None:
        """Stop listening; what was written before the reply is in the pipes by now."""
        for fd in (self.worker.out, self.worker.err, self.worker.status, self.worker.job.fileno()):
            self.loop.remove_reader(fd)
        for fd in (self.worker.out, self.worker.err):
            output = self.out if fd == self.worker.out else self.err
            while output.total <= self.limits.max_output_bytes:
                try:
                    data = os.read(fd, 1 << 16)
                except BlockingIOError:
                    break
                if not data:
                    break
                output.add(data)
