"""The sandbox "none", which runs code as an ordinary child process without isolation.

It is used only if the caller names it, for trusted code on machines where nothing else works. It limits time
and output, and gives each execution its own directory, but the code can reach the host's files, network and
processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from agentenv.core import UsageError
from agentenv.sandbox import (
    ExecRequest,
    ExecResult,
    ExecVerdict,
    Output,
    Sandbox,
    SandboxLimits,
    Session,
    as_bytes,
    clean_path,
    settle,
)

__all__ = ["UnsafeSandbox"]


class UnsafeSandbox(Sandbox):
    """Runs code in fresh processes and clean directories, but without isolation.

    Args:
        size: Number of executions that may run at the same time.
        limits: Limits of one execution. Only those for time, output and collected files have an effect.
    """

    def __init__(self, *, size: int = 4, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self._gate = asyncio.Semaphore(size)
        self._files: dict[str, bytes] = {}
        self._left: dict[str, bytes] = {}
        self._closed = False

    @property
    def description(self) -> str:
        """Name of the backend, with a warning."""
        return "none (NO isolation)"

    async def start(self) -> None:
        """Do nothing, because there is nothing to start."""

    async def execute(self, request: ExecRequest) -> ExecResult:
        """Run code or a command in a fresh process and a clean directory; `echo` is not supported."""
        if self._closed:
            raise UsageError("the sandbox is closed", remedy="make a new one with agentenv.sandbox.create()")
        if request.echo:
            raise UsageError('backend "none" cannot echo a last expression', remedy="print it")
        files = self._files | request.files
        if request.command is None:
            files["main.py"] = request.code.encode("utf-8", errors="replace")
            request = replace(request, command=[sys.executable, "-B", "main.py"])
        limits = request.limits or self.limits
        asked = asyncio.get_running_loop().time()
        async with self._gate:
            queue_s = asyncio.get_running_loop().time() - asked
            folder = await asyncio.to_thread(_fill, files)
            try:
                result = await _process(request, folder, limits)
                left = await asyncio.to_thread(_collect, folder, files, limits.collect_bytes)
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._left = left
        return replace(result, files=left, queue_s=queue_s)

    async def read_file(self, path: str) -> bytes:
        """Return a file that the last execution left, or else one that `write_file` wrote."""
        clean = clean_path(path)
        for files in (self._left, self._files):
            if clean in files:
                return files[clean]
        raise FileNotFoundError(f"no file {path!r} in the sandbox's working directory")

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file into the working directory of every later execution."""
        self._files[clean_path(path)] = as_bytes(data, f"file {path!r}")

    def session(self) -> Session:
        """Raise `UsageError`, because this backend cannot confine a process between calls."""
        raise UsageError('backend "none" has no sessions', remedy='use "local" or "e2b"')

    @asynccontextmanager
    async def lease(self) -> AsyncGenerator[UnsafeSandbox]:
        """Lend a clean sandbox that shares this one's limit on concurrent executions."""
        async with UnsafeSandbox(limits=self.limits) as lent:
            lent._gate = self._gate
            yield lent

    async def reset(self) -> None:
        """Remove all files."""
        self._files, self._left = {}, {}

    async def close(self) -> None:
        """Refuse further executions; nothing else has to end, because executions end with their calls."""
        self._closed = True


def _fill(files: Mapping[str, bytes]) -> str:
    folder = tempfile.mkdtemp(prefix="agentenv-unsafe-")
    for name, data in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def _collect(folder: str, given: Mapping[str, bytes], room: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in Path(folder).rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= room:
            name, data = str(path.relative_to(folder)), path.read_bytes()
            if given.get(name) != data:
                room -= len(data)
                files[name] = data
    return files


async def _process(request: ExecRequest, folder: str, limits: SandboxLimits) -> ExecResult:
    assert request.command is not None
    out, err = Output(limits.output_bytes), Output(limits.output_bytes)
    loop = asyncio.get_running_loop()
    began, reason = loop.time(), ""
    try:
        process = await asyncio.create_subprocess_exec(
            *request.command,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", **request.env},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        err.add(f"{request.command[0]}: {error}\n".encode(errors="replace"))
        return settle(ExecVerdict(exit=127), out, err, request.timeout_s, limits)
    assert process.stdin is not None
    process.stdin.write(request.stdin or b"")
    process.stdin.close()
    try:
        async with asyncio.timeout(request.timeout_s), asyncio.TaskGroup() as group:
            group.create_task(_read(process.stdout, out, limits))
            group.create_task(_read(process.stderr, err, limits))
            group.create_task(process.wait())
    except TimeoutError:
        reason = "timeout"
    except ExceptionGroup as several:
        if several.split(_Flood)[1] is not None:
            raise
        reason = "output_limit"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    code = process.returncode if process.returncode is not None else -9
    verdict = ExecVerdict(exit=code, reason=reason, duration_s=loop.time() - began)
    return settle(verdict, out, err, request.timeout_s, limits)


class _Flood(Exception):
    """The execution wrote more output than allowed."""


async def _read(stream: asyncio.StreamReader | None, output: Output, limits: SandboxLimits) -> None:
    assert stream is not None
    while data := await stream.read(1 << 16):
        output.add(data)
        if output.total > limits.max_output_bytes:
            raise _Flood
