"""Drive one worker: send the job, collect the output, end it in time, read the verdict."""

from __future__ import annotations

import asyncio
import json
import marshal
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from agentenv.errors import SandboxCrashed
from agentenv.sandbox.base import ExecResult, ExecStatus, SandboxLimits
from agentenv.sandbox.output import Output
from agentenv.sandbox.pool import Worker

__all__ = ["Lost", "Verdict", "pack", "run", "send", "settle"]

_GRACE_S = 2.0
"""The init ends an execution in time; the host steps in this much later."""
_INLINE_BYTES = 100_000
_SIGXCPU = 24


class Lost(Exception):
    """The worker went without a verdict."""


@dataclass(slots=True)
class Verdict:
    """What the init said."""

    exit: int = -9
    reason: str = ""
    duration_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    files_complete: bool = True

    @classmethod
    def parse(cls, data: bytes) -> Verdict:
        """Read a verdict and the files behind it.

        Raises:
            Lost: There is none: the init was killed.
            SandboxCrashed: The child could not be confined.
        """
        line, found, rest = data.partition(b"\n")
        if not found:
            raise Lost
        message = json.loads(line)
        if "failed" in message:
            raise SandboxCrashed(f"the sandbox could not be set up: {message['failed']}")
        if not message["started"] or message["reason"] == "stopped":
            raise Lost
        files: dict[str, bytes] = {}
        at = 0
        for name, size in message.get("files", []):
            files[bytes.fromhex(name).decode(errors="replace")] = rest[at : at + size]
            at += size
        return cls(
            exit=message["exit"],
            reason=message["reason"],
            duration_s=message["duration_s"],
            cpu_s=message["cpu_s"],
            max_rss_bytes=message["max_rss_bytes"],
            files=files,
            files_complete=message.get("files_complete", True),
        )


def send(worker: Worker, payload: bytes) -> None:
    """Hand over a job; a large one as a memory file.

    Raises:
        Lost: The worker has gone.
    """
    try:
        if len(payload) <= _INLINE_BYTES:
            worker.job.send(payload)
            return
        fd = os.memfd_create("job", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(payload)
            os.lseek(fd, 0, os.SEEK_SET)
            socket.send_fds(worker.job, [b"m"], [fd])
        finally:
            os.close(fd)
    except OSError as error:
        raise Lost from error


class _Run:
    """One execution in flight: three pipes and a clock."""

    def __init__(self, worker: Worker, limits: SandboxLimits) -> None:
        self.worker = worker
        self.limits = limits
        self.out = Output(limits.output_bytes)
        self.err = Output(limits.output_bytes)
        self.status = bytearray()
        self.reason = ""
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.open = {worker.out, worker.err, worker.status}

    def listen(self) -> None:
        self.loop.add_reader(self.worker.out, self._read, self.worker.out, self.take_out)
        self.loop.add_reader(self.worker.err, self._read, self.worker.err, self.take_err)
        self.loop.add_reader(self.worker.status, self._read, self.worker.status, self.status.extend)

    def take_out(self, data: bytes) -> None:
        self.out.add(data)
        self._bound(self.out)

    def take_err(self, data: bytes) -> None:
        self.err.add(data)
        self._bound(self.err)

    def _bound(self, output: Output) -> None:
        if output.total > self.limits.max_output_bytes and not self.reason:
            self.stop("output_limit")

    def _read(self, fd: int, take: Callable[[bytes], None]) -> None:
        data = os.read(fd, 1 << 16)
        if data:
            take(data)
            return
        self.loop.remove_reader(fd)
        self.open.discard(fd)
        if not self.open and not self.done.done():
            self.done.set_result(None)

    def stop(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            self.worker.kill()

    def give_up(self) -> None:
        if not self.done.done():
            self.done.set_exception(SandboxCrashed("an execution did not end when it was killed"))

    def close(self) -> None:
        for fd in self.open:
            self.loop.remove_reader(fd)
        if self.open:
            self.worker.kill()
        self.worker.close()


async def run(worker: Worker, payload: bytes, timeout_s: float, limits: SandboxLimits) -> ExecResult:
    """Run one job in a fresh worker and close it.

    Raises:
        Lost: The worker went without a verdict; the job may be given to another one.
        SandboxCrashed: The child could not be confined or ended.
    """
    self = _Run(worker, limits)
    timers = (
        self.loop.call_later(timeout_s + _GRACE_S, self.stop, "timeout"),
        self.loop.call_later(timeout_s + 5 * _GRACE_S, self.give_up),
    )
    began = self.loop.time()
    try:
        self.listen()
        send(worker, payload)
        await self.done
    finally:
        for timer in timers:
            timer.cancel()
        self.close()
    try:
        verdict = Verdict.parse(bytes(self.status))
    except Lost:
        if not self.reason:
            raise
        verdict = Verdict(duration_s=self.loop.time() - began)
    verdict.reason = self.reason or verdict.reason
    return settle(verdict, self.out, self.err, timeout_s, limits)


def settle(verdict: Verdict, out: Output, err: Output, timeout_s: float, limits: SandboxLimits) -> ExecResult:
    """Put a verdict and the output into words."""
    stderr = err.text()
    status, note = _status(verdict, stderr, timeout_s, limits)
    result = ExecResult(
        status=status,
        stdout=out.text(),
        stderr=stderr,
        exit_code=verdict.exit,
        truncated=out.truncated or err.truncated,
        duration_s=verdict.duration_s,
        max_rss_bytes=verdict.max_rss_bytes,
        cpu_s=verdict.cpu_s,
        stdout_bytes=out.total,
        stderr_bytes=err.total,
        files=verdict.files,
        note=note,
    )
    if not verdict.files_complete:
        text = "; ".join(part for part in (note, "files over the limit were not kept") if part)
        result = replace(result, note=text)
    return result


def _status(verdict: Verdict, stderr: str, timeout_s: float, limits: SandboxLimits) -> tuple[ExecStatus, str]:
    notes: dict[str, tuple[ExecStatus, str]] = {
        "timeout": ("timeout", f"time limit of {timeout_s:g} s reached"),
        "memory": ("memory", f"memory limit of {limits.memory_bytes >> 20} MiB reached"),
        "output_limit": ("output_limit", f"output limit of {limits.max_output_bytes >> 10} KiB reached"),
        "disk": ("killed", f"disk limit of {2 * limits.work_bytes >> 20} MiB reached"),
    }
    if verdict.reason in notes:
        return notes[verdict.reason]
    if verdict.exit == 0:
        return "ok", ""
    if verdict.exit == -_SIGXCPU:
        return "timeout", "processor time limit reached"
    if verdict.exit < 0:
        return "killed", f"ended by signal {-verdict.exit}"
    if verdict.exit == 1 and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return "memory", f"a process may use {limits.address_space_bytes >> 20} MiB of addresses"
    return "error", f"exit code {verdict.exit}"


def pack(job: Mapping[str, object]) -> bytes:
    """Serialise a job; only the jail ever reads it, never the other way round."""
    return marshal.dumps(dict(job), 2)
