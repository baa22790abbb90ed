"""No isolation: model code runs as an ordinary child process of ours. Only by name.

For machines where nothing else works and the code is trusted. Time, output and the working directory
are bounded; the host's files, network and processes are open to the code.
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

from agentenv.core.errors import UsageError
from agentenv.core.execution import ExecResult
from agentenv.sandbox import checks
from agentenv.sandbox.base import Sandbox, Session
from agentenv.sandbox.local.output import Output
from agentenv.sandbox.local.running import ExecVerdict, settle
from agentenv.sandbox.request import ExecRequest, SandboxLimits

__all__ = ["UnsafeSandbox"]


class UnsafeSandbox(Sandbox):
    """Fresh processes and clean directories, but nothing that holds the code back.

    Args:
        size: Executions at once.
        limits: Of them, the time, output and collecting limits hold; the rest needs a jail.
    """

    def __init__(self, *, size: int = 4, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self._gate = asyncio.Semaphore(size)
        self._files: dict[str, bytes] = {}
        self._left: dict[str, bytes] = {}
        self._closed = False

    @property
    def description(self) -> str:
        """Backend and what it lacks."""
        return "none (NO isolation)"

    async def start(self) -> None:
        """Nothing to start."""

    async def execute(self, request: ExecRequest) -> ExecResult:
        """Run code or a command in a fresh process and a clean directory; `echo` is not to be had here."""
        if self._closed:
            raise UsageError("the sandbox is closed", remedy="make a new one with agentenv.sandbox.create()")
        if request.echo:
            raise UsageError('backend "none" cannot echo a last expression', remedy="print it")
        given = self._files | request.files
        if request.command is None:
            given["main.py"] = request.code.encode("utf-8", errors="replace")
            request = replace(request, command=[sys.executable, "-B", "main.py"])
        limits = request.limits or self.limits
        asked = asyncio.get_running_loop().time()
        async with self._gate:
            queue_s = asyncio.get_running_loop().time() - asked
            folder = await asyncio.to_thread(_fill, given)
            try:
                result = await _process(request, folder, limits)
                left = await asyncio.to_thread(_collect, folder, given, limits.collect_bytes)
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._left = left
        return replace(result, files=left, queue_s=queue_s)

    async def read_file(self, path: str) -> bytes:
        """Return what the last execution left under a name, else what `write_file` put there."""
        clean = checks.clean_path(path)
        for place in (self._left, self._files):
            if clean in place:
                return place[clean]
        raise FileNotFoundError(f"no file {path!r} in the sandbox's working directory")

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Put a file into the working directory of every later execution."""
        self._files[checks.clean_path(path)] = checks.as_bytes(data, f"file {path!r}")

    def session(self) -> Session:
        """Refuse: state between calls needs a jail to hold it."""
        raise UsageError('backend "none" has no sessions', remedy='use "local" or "e2b"')

    @asynccontextmanager
    async def lease(self) -> AsyncGenerator[UnsafeSandbox]:
        """Lend a clean sandbox."""
        async with UnsafeSandbox(limits=self.limits) as lent:
            lent._gate = self._gate
            yield lent

    async def reset(self) -> None:
        """Forget every file."""
        self._files, self._left = {}, {}

    async def close(self) -> None:
        """Nothing to end: executions end with their calls."""
        self._closed = True


def _fill(files: Mapping[str, bytes]) -> str:
    folder = tempfile.mkdtemp(prefix="agentenv-unsafe-")
    for name, data in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def _collect(folder: str, given: Mapping[str, bytes], room: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in Path(folder).rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= room:
            name, data = str(path.relative_to(folder)), path.read_bytes()
            if given.get(name) != data:
                room -= len(data)
                found[name] = data
    return found


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
    """More output than allowed."""


async def _read(stream: asyncio.StreamReader | None, output: Output, limits: SandboxLimits) -> None:
    assert stream is not None
    while data := await stream.read(1 << 16):
        output.add(data)
        if output.total > limits.max_output_bytes:
            raise _Flood
