"""A process of a container that keeps its state between calls: a shell, or Python."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path

from agentenv.core import SandboxCrashed
from agentenv.sandbox import ExecRequest, ExecResult, ExecVerdict, Output, SandboxLimits, settle
from agentenv_containers.container import Container, Flood
from agentenv_containers.runtime import end

__all__ = ["Conversation", "Python", "Shell"]

_DRIVER = Path(__file__).with_name("driver.py")


class Conversation:
    """One process that gets commands on its standard input and says with a mark when one has ended.

    Args:
        container: the container.
        command: the program and its arguments.
        limits: limits of the output.
        user: user in the container; empty means the image's.
    """

    def __init__(
        self, container: Container, command: Sequence[str], limits: SandboxLimits, *, user: str = ""
    ) -> None:
        self.container, self.limits, self.user = container, limits, user
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.returncode is None

    async def ask(self, text: bytes, mark: bytes, timeout_s: float) -> ExecResult:
        """Send text, and return what is written until the mark stands on both outputs.

        A time-out, a flood of output or the end of the process ends the conversation.

        Raises:
            SandboxCrashed: The container or its runtime failed.
        """
        if not self.alive:
            options = ("-i", f"--user={self.user}") if self.user else ("-i",)
            self._process = await self.container.runtime.spawn(
                "exec", *options, self.container.name, *self._command, stdin=True
            )
        process = self._process
        assert process is not None
        assert process.stdin is not None
        loop = asyncio.get_running_loop()
        out, err = _Marked(mark, self.limits), _Marked(mark, self.limits)
        began, reason = loop.time(), ""
        try:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(text)
                await process.stdin.drain()
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                group.create_task(out.read(process.stdout))
                group.create_task(err.read(process.stderr))
        except TimeoutError:
            reason = "timeout"
        except ExceptionGroup as several:
            if several.split(Flood)[1] is not None:
                raise
            reason = "output_limit"
        except asyncio.CancelledError:
            await asyncio.shield(self.close())
            raise
        code = out.code
        if not reason and code is None:
            # Both outputs have ended, and closing at once would lose the exit code.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 10)
        if reason or code is None:
            await self.close()
            if not await self.container.is_running():
                raise SandboxCrashed(f"container {self.container.name} is gone: {err.output.text()[-300:]}")
            code = process.returncode if code is None and process.returncode is not None else -9
        verdict = ExecVerdict(exit=code, reason=reason, duration_s=loop.time() - began)
        return settle(verdict, out.output, err.output, timeout_s, self.limits)

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await end(process)


class Shell(Conversation):
    """A bash that keeps directory, variables and background jobs between commands."""

    def __init__(self, container: Container, limits: SandboxLimits, *, user: str = "") -> None:
        self._seal = f"AGENTENV_SHELL={secrets.token_hex(8)}"
        command = ("env", self._seal, "bash", "--noprofile", "--norc")
        super().__init__(container, command, limits, user=user)

    async def command(self, line: str, timeout_s: float) -> ExecResult:
        """Run a line of bash, and return its output, standard error within it.

        After a time-out the shell's processes are ended, and the next command starts a new shell. Processes
        that have left the shell's session go on, as they would at a terminal.
        """
        mark = f"AGENTENV_END_{secrets.token_hex(8)}"
        said = f"printf '%s %s\\n' {mark} $?; printf '%s 0\\n' {mark} >&2\n"
        text = f"eval {shlex.quote(line)} </dev/null 2>&1; {said}"
        result = await self.ask(text.encode(errors="replace"), mark.encode(), timeout_s)
        if not self.alive:
            await self._end_rest()
        return result

    async def _end_rest(self) -> None:
        """Kill what the ended shell has left in its session: all that inherited its variable."""
        line = 'for p in /proc/[0-9]*; do grep -qs "$0" "$p/environ" && kill -9 "${p#/proc/}"; done; true'
        with contextlib.suppress(SandboxCrashed):
            await self.container.run(("sh", "-c", line, self._seal), user=self.user)


class Python(Conversation):
    """A Python that keeps names and imports between pieces of code."""

    def __init__(self, container: Container, limits: SandboxLimits, python: str) -> None:
        line = (
            f'ulimit -v {limits.address_space_bytes >> 10}; ulimit -t {limits.cpu_s}; exec "$0" -B -u -c "$1"'
        )
        super().__init__(container, ("sh", "-c", line, python, _DRIVER.read_text()), limits)

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run the code of a request."""
        mark = f"AGENTENV_END_{secrets.token_hex(8)}"
        stdin = (request.stdin or b"").decode(errors="replace")
        job = {"code": request.code, "echo": request.echo, "env": request.env, "stdin": stdin, "mark": mark}
        return await self.ask(json.dumps(job).encode() + b"\n", mark.encode(), request.timeout_s)


class _Marked:
    """The part of a stream that ends with a mark and an exit code."""

    def __init__(self, mark: bytes, limits: SandboxLimits) -> None:
        self.output = Output(limits.output_bytes)
        self.code: int | None = None
        self._mark, self._limits = mark, limits

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        """Read up to the mark, or to the end of the stream."""
        assert stream is not None
        held = b""
        while data := await stream.read(1 << 16):
            held += data
            before, found, after = held.partition(self._mark)
            if found and b"\n" in after:
                self.output.add(before)
                said = after.split(b"\n", 1)[0].strip()
                self.code = int(said) if said.isdigit() else 0
                return
            # The end may hold the beginning of the mark, so it is kept for the next look.
            keep = len(held) - len(self._mark) - 8 if not found else len(before)
            if keep > 0:
                self.output.add(held[:keep])
                held = held[keep:]
            if self.output.total > self._limits.max_output_bytes:
                raise Flood
        self.output.add(held)
