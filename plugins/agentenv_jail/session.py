"""A session in the jail: one worker process that runs one step after another."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite

from agentenv.core import ExecResult, SandboxCrashed, UsageError
from agentenv.sandbox import (
    MAX_JOB_BYTES,
    ExecRequest,
    ExecVerdict,
    Output,
    SandboxLimits,
    Session,
    as_bytes,
    clean_path,
    oversized,
    settle,
)
from agentenv_jail.jail.messages import (
    GO_ON,
    MAX_DATA_BYTES,
    REPLY,
    REPLY_FAILED,
    REPLY_TIMED_OUT,
    STOP,
)
from agentenv_jail.pool import Pool, Worker
from agentenv_jail.running import Lost, drain, pack, receive, send

__all__ = ["MAX_REPLY_BYTES", "LocalSession", "StepReply"]

_GRACE_S = 2.0
_START_S = 30.0
_MAX_READ_BYTES = 32 << 20


class LocalSession(Session):
    """A session in a worker of the jail; see `Session`.

    Args:
        find_pool: returns the pool that lends the worker.
        gate: limits how many steps run at once.
        limits: limits of the session and its steps.
        files: files that are there at the start.
        background: let what a step started run on between the steps.
    """

    def __init__(
        self,
        find_pool: Callable[[], Awaitable[Pool]],
        gate: asyncio.Semaphore,
        limits: SandboxLimits,
        files: Mapping[str, bytes],
        *,
        background: bool = False,
    ) -> None:
        self._background = background
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
        """True between the start of the process and its end."""
        return self._worker is not None and not self._why

    @property
    def ended(self) -> bool:
        """True once the process has ended, for any reason."""
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
                result, _ = await self._exchange(job, _START_S, 0)
                if result.status != "ok":
                    raise SandboxCrashed(f"a session could not be started: {result.note} {result.stderr}")

    async def execute(self, request: ExecRequest) -> ExecResult:
        """Run Python code in the session's process, or a command as its child; names and files stay.

        A command that reaches its time limit is ended; the session goes on.
        """
        if request.limits is not None:
            raise UsageError("a call in a session cannot have limits of its own", remedy="leave them out")
        is_code = request.command is None
        if is_code and (request.env or request.stdin is not None):
            raise UsageError(
                "code in a session cannot have an environment or input of its own",
                remedy="leave env and stdin out",
            )
        job = {**request.job(), "files": {}}
        files = request.files
        if (size := sum(map(len, files.values())) + len(pack(job))) > MAX_JOB_BYTES:
            return oversized(size)
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
        """Return the content of a file in the session's directory; at most 32 MiB of it."""
        job: dict[str, object] = {"kind": "read", "path": clean_path(path)}
        content = bytearray()
        await self.start()
        deadline = asyncio.get_running_loop().time() + self.limits.timeout_s
        while len(content) < _MAX_READ_BYTES:
            reason, data = await self._file({**job, "at": len(content)}, deadline)
            if reason:
                raise FileNotFoundError(f"no file {path!r} in the session's working directory: {reason}")
            content += data
            if len(data) < MAX_DATA_BYTES:
                break
        return bytes(content[:_MAX_READ_BYTES])

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file into the session's directory."""
        content = as_bytes(data, f"file {path!r}")
        if len(content) > MAX_JOB_BYTES:
            raise UsageError(
                f"file {path!r} has {len(content):,} bytes, but at most {MAX_JOB_BYTES:,} are allowed"
            )
        job: dict[str, object] = {"kind": "write", "path": clean_path(path), "data": content}
        await self.start()
        reason, _ = await self._file(job, asyncio.get_running_loop().time() + self.limits.timeout_s)
        if reason:
            raise OSError(f"file {path!r} cannot be written in the sandbox: {reason}")

    async def _file(self, job: dict[str, object], deadline: float) -> tuple[str, bytes]:
        """Read or write a file in the session; return the reason of a failure, and the data of the file."""
        async with self._one_at_a_time:
            wait_s = max(0.0, deadline - asyncio.get_running_loop().time())
            result, reply = await self._step(job, wait_s, self.limits.timeout_s)
        if reply is None or result.status != "ok":
            return result.note or result.status, b""
        return reply.failed, reply.data

    async def _step(
        self, job: dict[str, object], wait_s: float, timeout_s: float
    ) -> tuple[ExecResult, StepReply | None]:
        """Send one job and wait for its reply, for the end of the process, or for the time limit."""
        if self._worker is None or self._why:
            note = f"the session has ended ({self._why or 'closed'}) and its state is lost; open a new one"
            return ExecResult(status="killed", stderr=note + "\n", note=note), None
        self._count += 1
        return await self._exchange({**job, "id": self._count, "timeout_s": timeout_s}, wait_s, self._count)

    async def _exchange(
        self, job: Mapping[str, object], wait_s: float, number: int
    ) -> tuple[ExecResult, StepReply | None]:
        assert self._worker is not None
        worker, limit_s = self._worker, job["timeout_s"]
        timeout_s = float(limit_s) if isinstance(limit_s, int | float) else wait_s
        step = self._current = _Step(worker, self._pipes, self.limits, number)
        try:
            if not self._background:
                worker.order(GO_ON)
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
        if not self._background and step.reply is not None:
            # Before the caller goes on, which may take minutes until the next step: a thread or a process
            # that was left behind would take the processor from other episodes all that time.
            worker.order(STOP)
        return self._settle(step, timeout_s), step.reply

    def _settle(self, step: _Step, timeout_s: float) -> ExecResult:
        """Make the result of a step; the session ends unless there is a reply within all limits."""
        if step.reply is not None and not step.reason:
            verdict = ExecVerdict(
                exit=step.reply.exit,
                reason="timeout" if step.reply.timed_out else "",
                duration_s=step.reply.duration_s,
                cpu_s=step.reply.cpu_s,
                max_rss_bytes=step.reply.max_rss_bytes,
            )
            return replace(settle(verdict, step.out, step.err, timeout_s, self.limits), files=None)
        verdict = ExecVerdict(reason=step.reason, duration_s=step.elapsed())
        if step.reason == "lost" and step.verdict is not None:
            verdict = step.verdict
        result = settle(verdict, step.out, step.err, timeout_s, self.limits)
        forged = "it sent a message that is not the reply to its step" if step.reason == "forged" else ""
        self._end(forged or result.note or f"its process ended with exit code {result.exit_code}")
        note = f"{self._why}; the session has ended and its state is lost"
        status = "killed" if result.status in ("ok", "error") else result.status
        return replace(result, status=status, note=note, files=None)

    def _over(self, message: bytes, memory: list[int]) -> None:
        """Handle the init's message that the process has ended."""
        try:
            verdict = receive(message, memory)
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


class _Step:
    """One job of a session that is running."""

    def __init__(self, worker: Worker, pipes: tuple[int, int], limits: SandboxLimits, number: int) -> None:
        self.worker = worker
        self.limits = limits
        self.number = number
        self.out, self.err = Output(limits.output_bytes), Output(limits.output_bytes)
        self.outputs = dict(zip(pipes, (self.out, self.err), strict=True))
        self.verdict: ExecVerdict | None = None
        self.reply: StepReply | None = None
        self.reason = ""
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
        """Receive the reply. Any other message is forged and ends the session, so that a flood of them does.

        The kernel closes descriptors that come with a message, because `recv` has no room for them.
        """
        try:
            message = self.worker.job.recv(MAX_REPLY_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        self.loop.remove_reader(self.worker.job.fileno())
        if not message:
            return  # the process has ended, and the init's verdict follows
        self.reply = StepReply.parse(message, self.number)
        if self.reply is None:
            self.reason = self.reason or "forged"
        self._finish()

    def end(self, verdict: ExecVerdict | None) -> None:
        """Stop waiting for a reply, because the process has ended."""
        self.verdict = self.verdict or verdict
        self.stop()
        self.reason = self.reason or "lost"
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def stop(self) -> None:
        """Stop listening and read the rest of the output, which was written before the reply."""
        if self.stopped:
            return
        self.stopped = True
        self.loop.remove_reader(self.worker.job.fileno())
        for fd, output in self.outputs.items():
            self.loop.remove_reader(fd)
            drain(fd, output, self.limits.max_output_bytes)


MAX_REPLY_BYTES = REPLY.size + MAX_DATA_BYTES
_MAX_REASON_CHARS = 300
_MAX_RSS_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class StepReply:
    """What the process says of a step. Every value is in the range that an honest process could report."""

    exit: int
    timed_out: bool
    duration_s: float
    cpu_s: float
    max_rss_bytes: int
    failed: str
    """Reason why the step failed; empty if it did not."""
    data: bytes

    @classmethod
    def parse(cls, message: bytes, number: int) -> StepReply | None:
        """Return the reply to the step of this number, or None if the message is anything else."""
        if not REPLY.size <= len(message) <= MAX_REPLY_BYTES:
            return None
        answered, code, flags, duration_s, cpu_s, rss = REPLY.unpack_from(message)
        seconds_are_real = all(isfinite(seconds) and seconds >= 0 for seconds in (duration_s, cpu_s))
        if answered != number or not -64 <= code <= 255 or not seconds_are_real or rss > _MAX_RSS_BYTES:
            return None
        data = message[REPLY.size :]
        failed = data.decode(errors="replace")[:_MAX_REASON_CHARS] if flags & REPLY_FAILED else ""
        timed_out = bool(flags & REPLY_TIMED_OUT)
        return cls(code, timed_out, duration_s, cpu_s, rss, failed, b"" if failed else data)
