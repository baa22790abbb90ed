"""A session in the jail: one worker that takes one step after another."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from agentenv.core.errors import SandboxCrashed, UsageError
from agentenv.core.execution import ExecResult
from agentenv.sandbox import checks
from agentenv.sandbox.base import Session
from agentenv.sandbox.local.output import Output
from agentenv.sandbox.local.pool import Pool, Worker
from agentenv.sandbox.local.running import ExecVerdict, Lost, drain, pack, send, settle
from agentenv.sandbox.request import ExecRequest, SandboxLimits

__all__ = ["LocalSession"]

_GRACE_S = 2.0
_START_S = 30.0
_MAX_READ_BYTES = 32 << 20


class LocalSession(Session):
    """State kept between calls; see `Session`."""

    def __init__(
        self,
        find_pool: Callable[[], Awaitable[Pool]],
        gate: asyncio.Semaphore,
        limits: SandboxLimits,
        files: Mapping[str, bytes],
    ) -> None:
        self.limits = limits
        self._find_pool = find_pool
        self._gate = gate
        self._files = dict(files)
        self._pool: Pool | None = None
        self._worker: Worker | None = None
        self._pipes = (-1, -1)
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

    async def start(self) -> None:
        """Start the process."""
        if self.closed:
            raise UsageError("the session is closed", remedy="open a new one")
        async with self._starting:
            if self._worker is None and not self._why:
                self._pool = await self._find_pool()
                self._worker = await self._pool.keep()
                self._pipes = self._worker.take_pipes()
                self._worker.listener = self._over
                job = {"kind": "session", "timeout_s": None, "files": self._files, "env": {}}
                result, _, _ = await self._exchange(job, _START_S, 0)
                if result.status != "ok":
                    raise SandboxCrashed(f"a session could not be started: {result.note} {result.stderr}")

    async def execute(self, request: ExecRequest) -> ExecResult:
        """Run Python code in the session's process, or a command beside it; names and files stay.

        A command that runs out of time ends alone; the session goes on.
        """
        if request.limits is not None:
            raise UsageError("what runs in a session has the session's limits", remedy="leave them out")
        is_code = request.command is None
        if is_code and (request.env or request.stdin is not None):
            raise UsageError(
                "a session's code has the session's environment and input", remedy="leave them out"
            )
        job = {**request.job(), "files": {}}
        files = request.files
        if (size := sum(map(len, files.values())) + len(pack(job))) > checks.MAX_JOB_BYTES:
            return checks.oversized(size)
        for path, data in files.items():
            await self.write_file(path, data)
        await self.start()
        asked = asyncio.get_running_loop().time()
        async with self._one_at_a_time, self._gate:
            began = asyncio.get_running_loop().time()
            wait_s = request.timeout_s + (0.0 if is_code else _GRACE_S)
            result = await self._step(job, wait_s, request.timeout_s)
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
        await self.start()
        async with self._one_at_a_time:
            result, reason, fd = await self._step(job, self.limits.timeout_s, self.limits.timeout_s)
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
        step = self._current = _Step(worker, self._pipes, self.limits, number)
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
        return self._settle(step, timeout_s), str(step.reply.get("failed", "")), step.fd

    def _settle(self, step: _Step, timeout_s: float) -> ExecResult:
        reply = step.reply
        ended = bool(step.reason) or not reply
        reason = step.reason or ("" if reply else "lost")
        verdict = ExecVerdict(
            exit=_whole(reply.get("exit", 0)) if reply else -9,
            reason=reason if ended else str(reply.get("reason", "")),
            duration_s=float(_number(reply.get("duration_s"), step.elapsed())),
            cpu_s=float(_number(reply.get("cpu_s"), 0.0)),
            max_rss_bytes=_whole(reply.get("max_rss_bytes", 0)),
        )
        if reason == "lost":
            verdict = step.verdict or verdict
        result = settle(verdict, step.out, step.err, timeout_s, self.limits)
        if ended:
            self._end(result.note or f"its process ended with exit code {result.exit_code}")
            note = f"{self._why}; the session has ended and its state is lost"
            status = "killed" if result.status in ("ok", "error") else result.status
            result = replace(result, status=status, note=note, files=None)
        return replace(result, files=None)

    def _over(self, message: bytes, memory: list[int]) -> None:
        """Take the init's word that the process has ended."""
        for fd in memory:
            os.close(fd)
        try:
            verdict = ExecVerdict.parse(message.partition(b"\n")[0] + b"\n")
        except (Lost, SandboxCrashed):
            verdict = None
        if self._current is not None:
            self._current.end(verdict)
        else:
            code = verdict.exit if verdict is not None else 0
            self._end(f"ended by signal {-code}" if code < 0 else "its process ended")

    def _end(self, why: str) -> None:
        self._why = self._why or why
        worker, self._worker = self._worker, None
        if worker is None or self._pool is None:
            return
        if self._current is not None:
            self._current.end(None)
        worker.listener = None
        worker.kill()
        self._pool.discard(worker)
        for fd in self._pipes:
            os.close(fd)

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

    def __init__(self, worker: Worker, pipes: tuple[int, int], limits: SandboxLimits, number: int) -> None:
        self.worker = worker
        self.limits = limits
        self.number = number
        self.out, self.err = Output(limits.output_bytes), Output(limits.output_bytes)
        self.outputs = dict(zip(pipes, (self.out, self.err), strict=True))
        self.verdict: ExecVerdict | None = None
        self.reply: dict[str, object] = {}
        self.reason = ""
        self.fd = -1
        self.stopped = False
        self.loop = asyncio.get_running_loop()
        self.began = self.loop.time()
        self.done: asyncio.Future[None] = self.loop.create_future()
        for fd in pipes:
            self.loop.add_reader(fd, self._output, fd)
        self.loop.add_reader(worker.job.fileno(), self._replied)

    def elapsed(self) -> float:
        return self.loop.time() - self.began

    def _output(self, fd: int) -> None:
        output = self.outputs[fd]
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

    def end(self, verdict: ExecVerdict | None) -> None:
        """Stop waiting for a reply: the process is gone."""
        self.verdict = self.verdict or verdict
        self.stop()
        self.reason = self.reason or "lost"
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def stop(self) -> None:
        """Stop listening; what was written before the reply is in the pipes by now."""
        if self.stopped:
            return
        self.stopped = True
        self.loop.remove_reader(self.worker.job.fileno())
        for fd, output in self.outputs.items():
            self.loop.remove_reader(fd)
            drain(fd, output, self.limits.max_output_bytes)
