"""Run one job in a worker: send it, collect its output, end it at the time limit and read the verdict."""

from __future__ import annotations

import asyncio
import json
import marshal
import os
import socket
from collections.abc import Mapping

from agentenv.core import ExecResult, SandboxCrashed
from agentenv.sandbox import ExecVerdict, Output, SandboxLimits, settle
from agentenv_jail.pool import Worker

__all__ = ["Lost", "drain", "pack", "receive", "run", "send"]

_PATIENCE_S = 0.005
"""Seconds after which output is read while the job runs. Most executions end before that, so that they wake
the event loop only once."""
_GRACE_S = 2.0
"""Seconds after the time limit at which the host ends an execution that the init did not end."""
_INLINE_BYTES = 100_000


class Lost(Exception):
    """The worker ended without a verdict."""


def receive(message: bytes, memory: list[int]) -> ExecVerdict:
    """Parse a message of an init, or the memory file that came in its place, and close the file.

    Raises:
        Lost: There is no verdict, because the init was killed.
        SandboxCrashed: The child could not be confined, or the message cannot be read.
    """
    try:
        for fd in memory:
            with open(fd, "rb", closefd=False) as file:
                message = file.read()
        return _parsed(message)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SandboxCrashed(f"a verdict of the sandbox cannot be read: {error}") from error
    finally:
        for fd in memory:
            os.close(fd)


def _parsed(data: bytes) -> ExecVerdict:
    line, newline, rest = data.partition(b"\n")
    if not newline:
        raise Lost
    message = json.loads(line)
    if "failed" in message:
        raise SandboxCrashed(f"the sandbox could not be set up: {message['failed']}")
    if not message["started"] or message["reason"] == "stopped":
        raise Lost
    files: dict[str, bytes] = {}
    at = 0
    for name, size in message["files"]:
        files[bytes.fromhex(name).decode(errors="replace")] = rest[at : at + size]
        at += size
    return ExecVerdict(
        exit=message["exit"],
        reason=message["reason"],
        duration_s=message["duration_s"],
        cpu_s=message["cpu_s"],
        max_rss_bytes=message["max_rss_bytes"],
        files=files,
        files_complete=message["files_complete"],
    )


def send(worker: Worker, payload: bytes) -> None:
    """Send a job to a worker; a large job is sent as a memory file.

    Raises:
        Lost: The worker has ended.
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


def drain(fd: int, output: Output, limit: int) -> None:
    """Read everything that is in a pipe now, up to the limit."""
    while output.total <= limit:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            return
        output.add(data)


class _Run:
    """One job that is running."""

    def __init__(self, worker: Worker, timeout_s: float, limits: SandboxLimits) -> None:
        self.worker = worker
        self.timeout_s = timeout_s
        self.limits = limits
        self.out, self.err = Output(limits.output_bytes), Output(limits.output_bytes)
        self.outputs = dict(zip(worker.take_pipes(), (self.out, self.err), strict=True))
        self.verdict: ExecVerdict | None = None
        self.reason = ""
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.listening = False
        self.timer = self.loop.call_later(_PATIENCE_S, self.listen)
        worker.listener = self.ended

    def listen(self) -> None:
        """Begin to read what the job writes while it runs, and set the time limit of the host."""
        self.listening = True
        for fd in self.outputs:
            self.loop.add_reader(fd, self.read, fd)
        self.timer = self.loop.call_later(self.timeout_s + _GRACE_S, self.stop, "timeout")

    def read(self, fd: int) -> None:
        output = self.outputs[fd]
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:  # the code itself can read its pipe if it runs as the user of the host
            return
        output.add(data)
        if not data:
            self.loop.remove_reader(fd)
        elif output.total > self.limits.max_output_bytes:
            self.stop("output_limit")

    def stop(self, reason: str) -> None:
        """End the job from the host."""
        if not self.reason:
            self.reason = reason
            self.worker.kill()
            self.timer.cancel()
            self.timer = self.loop.call_later(4 * _GRACE_S, self.give_up)

    def give_up(self) -> None:
        if not self.done.done():
            self.done.set_exception(SandboxCrashed("an execution did not end when it was killed"))

    def ended(self, message: bytes, memory: list[int]) -> None:
        """Store the verdict. Nothing writes to the pipes any more, unless the init was killed."""
        try:
            self.verdict = receive(message, memory)
        except Lost:
            pass
        except SandboxCrashed as error:
            if not self.done.done():
                self.done.set_exception(error)
        for fd, output in self.outputs.items():
            drain(fd, output, self.limits.max_output_bytes)
            if output.total > self.limits.max_output_bytes:
                self.reason = self.reason or "output_limit"
        if not self.done.done():
            self.done.set_result(None)

    def close(self) -> None:
        self.timer.cancel()
        if self.worker.listener == self.ended:  # it still runs the job, for which nobody waits any more
            self.worker.listener = None
            self.worker.kill()
        for fd in self.outputs:
            if self.listening:
                self.loop.remove_reader(fd)
            os.close(fd)


async def run(worker: Worker, payload: bytes, timeout_s: float, limits: SandboxLimits) -> ExecResult:
    """Run one job.

    Raises:
        Lost: The worker ended without a verdict; the caller may send the job to another worker.
        SandboxCrashed: The child could not be confined or ended.
    """
    self = _Run(worker, timeout_s, limits)
    began = self.loop.time()
    try:
        send(worker, payload)
        await self.done
    finally:
        self.close()
    verdict = self.verdict
    if verdict is None:
        if not self.reason:
            raise Lost
        verdict = ExecVerdict(duration_s=self.loop.time() - began)
    verdict.reason = self.reason or verdict.reason
    return settle(verdict, self.out, self.err, timeout_s, limits)


def pack(job: Mapping[str, object]) -> bytes:
    """Serialise a job for the jail; the host never unmarshals anything from the jail, which is unsafe."""
    return marshal.dumps(dict(job), 2)
