"""Start, share, use and end sandboxes in E2B's cloud."""

from __future__ import annotations

import asyncio
import importlib
import logging
import secrets
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentenv.core import DependencyMissing, SandboxCrashed, SandboxUnavailable, UsageError
from agentenv.sandbox import (
    ExecRequest,
    ExecResult,
    ExecVerdict,
    Output,
    SandboxLimits,
    as_bytes,
    clean_path,
    settle,
)

__all__ = ["HOME", "Cloud", "Remote", "RemoteWorkspace"]

HOME = "/home/user"
_SIGN_OF_LIFE_S = 10.0
_log = logging.getLogger(__name__)


class _Flood(Exception):
    """The execution wrote more output than allowed."""


@dataclass(slots=True)
class Remote:
    """One sandbox in the cloud, and the time at which it would end by itself."""

    box: Any
    ends_at: float


class Cloud:
    """The cloud sandboxes of one backend. They are reused, limited in number, and killed at the end."""

    def __init__(self, size: int, options: Mapping[str, Any], lifetime_s: float) -> None:
        try:
            self.sdk = importlib.import_module("e2b_code_interpreter")
            self.errors = importlib.import_module("e2b.exceptions")
            self.exit_error = importlib.import_module("e2b").CommandExitException
        except ImportError as error:
            raise DependencyMissing.of(
                "e2b-code-interpreter", "e2b", purpose='sandbox backend "e2b"'
            ) from error
        self._options = options
        self._lifetime_s = lifetime_s
        self.room = asyncio.Semaphore(size)
        self._idle: list[Remote] = []
        self._all: list[Remote] = []
        self.closed = False

    async def take(self) -> Remote:
        """Return an idle or new sandbox with enough lifetime left.

        Raises:
            SandboxUnavailable: The service refuses or cannot be reached.
        """
        if self.closed:
            raise UsageError("the sandbox is closed", remedy="make a new one with agentenv.sandbox.create()")
        await self.room.acquire()
        try:
            while self._idle:
                remote = self._idle.pop()
                if await self.refresh(remote):
                    return remote
                await self.drop(remote)
            box = await self.sdk.AsyncSandbox.create(timeout=int(self._lifetime_s), **self._options)
        except BaseException as error:
            self.room.release()
            if isinstance(error, Exception):
                raise SandboxUnavailable(
                    f"e2b: cannot get a sandbox: {type(error).__name__}: {error}"
                ) from error
            raise
        remote = Remote(box, time.monotonic() + self._lifetime_s)
        self._all.append(remote)
        return remote

    async def refresh(self, remote: Remote) -> bool:
        """Extend the lifetime of a sandbox if necessary; return False if the sandbox is gone."""
        if time.monotonic() < remote.ends_at - self._lifetime_s / 2:
            return True
        try:
            await remote.box.set_timeout(int(self._lifetime_s))
        except Exception:  # noqa: BLE001 - the service's errors: a sandbox that does not answer is gone
            return False
        remote.ends_at = time.monotonic() + self._lifetime_s
        return True

    def give_back(self, remote: Remote) -> None:
        """Keep a sandbox for the next lease."""
        self._idle.append(remote)
        self.room.release()

    async def drop(self, remote: Remote) -> None:
        """Kill a sandbox; an error of the service is only logged, since the sandbox ends by itself later."""
        if remote in self._all:
            self._all.remove(remote)
            try:
                await remote.box.kill()
            except Exception as error:  # noqa: BLE001 - see docstring
                _log.warning("e2b: a sandbox could not be killed: %s", error)

    async def close(self) -> None:
        """Kill every sandbox."""
        self.closed = True
        self._idle.clear()
        await asyncio.gather(*(self.drop(remote) for remote in list(self._all)))


class RemoteWorkspace:
    """The operations in one remote sandbox that a sandbox and its sessions share."""

    def __init__(self, cloud: Cloud, limits: SandboxLimits) -> None:
        self.cloud = cloud
        self.limits = limits
        self.remote: Remote | None = None

    async def here(self) -> Any:
        """Return the remote sandbox; the first call starts it."""
        if self.remote is None:
            self.remote = await self.cloud.take()
        elif not await self.cloud.refresh(self.remote):
            await self.lose()
            raise SandboxCrashed("e2b: the sandbox has ended")
        return self.remote.box

    async def lose(self) -> None:
        """Drop a remote sandbox that does not answer."""
        remote, self.remote = self.remote, None
        if remote is not None:
            await self.cloud.drop(remote)
            self.cloud.room.release()

    async def guard(self, work: Awaitable[Any]) -> Any:
        """Await a call of the SDK; an unexpected error in it becomes `SandboxCrashed`."""
        try:
            return await work
        except (self.cloud.errors.TimeoutException, self.cloud.exit_error, _Flood):
            raise
        except Exception as error:
            await self.lose()
            raise SandboxCrashed(f"e2b: {type(error).__name__}: {error}") from error

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file in the working directory."""
        clean = clean_path(path)
        box = await self.here()
        try:
            return bytes(await box.files.read(f"{HOME}/{clean}", format="bytes"))
        except self.cloud.errors.NotFoundException:
            raise FileNotFoundError(f"no file {path!r} in the sandbox's working directory") from None

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file into the working directory."""
        clean, content = clean_path(path), as_bytes(data, f"file {path!r}")
        box = await self.here()
        await self.guard(box.files.write(f"{HOME}/{clean}", content))

    async def remote_code(self, context: Any, code: str, request: ExecRequest) -> tuple[ExecResult, bool]:
        """Run code in a context; return the result, and whether the context can still be used."""
        limits, timeout_s = (request.limits or self.limits).within(self.limits), request.timeout_s
        out, err = Output(limits.output_bytes), Output(limits.output_bytes)
        # The code writes this random word as its last act, so that a stream that broke off can be told from
        # an execution that ended.
        word = secrets.token_hex(16)
        ended = f"\n_ended = __import__('sys').stderr.write({word!r})"
        box, began, reason, error = await self.here(), time.monotonic(), "", None
        seen = bytearray()

        def take(output: Output) -> Callable[[Any], None]:
            def add(message: Any) -> None:
                data = str(message.line).encode(errors="replace")
                if output is err:
                    seen[:] = (seen + data)[-200:]
                output.add(data)
                if output.total > limits.max_output_bytes:
                    raise _Flood

            return add

        try:
            done = await self.guard(
                box.run_code(
                    code + ended,
                    context=context,
                    on_stdout=take(out),
                    on_stderr=take(err),
                    envs=request.env or None,
                    timeout=timeout_s,
                )
            )
            error = done.error
            for shown in done.results:
                out.add(f"{shown.text}\n".encode() if request.echo and shown.text else b"")
        except self.cloud.errors.TimeoutException:
            reason = "timeout"
        except _Flood:
            reason = "output_limit"
        if not reason and error is None and word.encode() not in seen and not await self._answers(context):
            await self.lose()
            raise SandboxCrashed("e2b: the execution's stream broke off before its end")
        exit_code = _exit_code(error)
        if error is not None and exit_code:
            err.add((error.traceback or f"{error.name}: {error.value}").encode(errors="replace") + b"\n")
        verdict = ExecVerdict(exit=exit_code, reason=reason, duration_s=time.monotonic() - began)
        result = settle(verdict, out, err, timeout_s, limits)
        written = err.total - len(word) * (word.encode() in seen)
        result = replace(result, stderr=result.stderr.replace(word, ""), stderr_bytes=written, files=None)
        return replace(result, exit_code=None if reason else exit_code), not reason

    async def _answers(self, context: Any) -> bool:
        """Return whether a context still runs code; code that called exit(0) writes no last word either."""
        word = secrets.token_hex(16)
        box = await self.here()
        try:
            done = await self.guard(
                box.run_code(f"print({word!r})", context=context, timeout=_SIGN_OF_LIFE_S)
            )
        except self.cloud.errors.TimeoutException:
            return False
        return word in "".join(done.logs.stdout)

    async def remote_command(self, request: ExecRequest) -> ExecResult:
        """Run a command in the working directory."""
        assert request.command is not None
        line = shlex.join(request.command)
        if request.stdin is not None:
            await self.write_file(".stdin", request.stdin)
            line = f"({line}) < .stdin"
        out, err = Output(self.limits.output_bytes), Output(self.limits.output_bytes)
        verdict, began = ExecVerdict(exit=0), time.monotonic()
        box = await self.here()
        try:
            await self.guard(
                box.commands.run(
                    line,
                    envs=request.env,
                    cwd=HOME,
                    timeout=request.timeout_s,
                    on_stdout=partial(_add_text, out),
                    on_stderr=partial(_add_text, err),
                )
            )
        except self.cloud.exit_error as error:
            verdict.exit = error.exit_code
        except self.cloud.errors.TimeoutException:
            verdict = ExecVerdict(reason="timeout")
        verdict.duration_s = time.monotonic() - began
        return replace(settle(verdict, out, err, request.timeout_s, self.limits), files=None)


def _add_text(output: Output, text: str) -> None:
    output.add(text.encode(errors="replace"))


def _exit_code(error: Any) -> int:
    """Return the exit code with which Python would end after this error."""
    if error is None:
        return 0
    if error.name == "SystemExit":
        return (
            int(error.value) & 0xFF
            if str(error.value).lstrip("-").isdigit()
            else int(error.value not in ("", "None"))
        )
    return 1
