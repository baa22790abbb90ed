"""A process of a container that keeps its state between calls: a shell, or Python."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentenv.core import SandboxCrashed
from agentenv.sandbox import ExecRequest, ExecResult, ExecVerdict, Output, SandboxLimits, settle
from agentenv_containers.container import Container, Flood
from agentenv_containers.processes import END_SINCE
from agentenv_containers.runtime import end

__all__ = ["Conversation", "Python", "Shell"]

_DRIVER = Path(__file__).with_name("driver.py")
_BEGINS_WITHIN_S = 120.0
"""Seconds in which a bash must start; a machine under load takes several."""
_GOES_ON_WITHIN_S = 3.0
"""Seconds in which a bash whose command was ended must say so."""
_CUT = 54
"""Signal that ends the line that a bash runs; nobody uses it for something else."""
_TRAP = f"trap '[ ${{#BASH_SOURCE[@]}} -gt $agentenv_depth ] && kill -9 $$; return 130' {_CUT}; "
"""bash obeys a signal between two commands. What it can leave then, without an end of the shell, is a sourced
file, so each line is one. From within a function or another file one would come back into the line."""
_EVAL = 'agentenv_depth=${#BASH_SOURCE[@]}; eval "$agentenv_line" 9<&-'
_NOW = "read -r agentenv_now agentenv_more < /proc/uptime"


class Conversation:
    """One process that gets commands on its standard input and says with a mark when one has ended.

    Args:
        container: the container.
        command: the program and its arguments.
        limits: limits of the output.
        user: user in the container; None or nothing means the image's.
    """

    def __init__(
        self,
        container: Container,
        command: Sequence[str],
        limits: SandboxLimits,
        *,
        user: str | int | None = None,
    ) -> None:
        self.container, self.limits, self.user = container, limits, user
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self.said = 0
        """The number behind the last mark on standard error."""

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.returncode is None

    async def ask(self, text: bytes, mark: bytes, timeout_s: float) -> ExecResult:
        """Send text, and return what is written until the mark stands on both outputs.

        A time-out or a flood of output ends what was asked for, and the process if it cannot go on.

        Raises:
            SandboxCrashed: The container or its runtime failed.
        """
        if not self.alive:
            options = self.container.exec_options(self.user)
            self._process = await self.container.runtime.spawn(
                "exec", "-i", *options, self.container.name, *self._command, stdin=True
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
            await asyncio.shield(self._abandon())
            raise
        took_s = loop.time() - began
        if reason:
            await self._cut(process, out, err)
        elif out.code is None:
            # Both outputs have ended, and closing at once would lose the exit code.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 10)
        if out.code is None:
            await self.close()
            if not await self.container.is_running():
                raise SandboxCrashed(f"container {self.container.name} is gone: {err.output.text()[-300:]}")
        self.said = err.code or 0
        code = process.returncode if out.code is None else out.code
        verdict = ExecVerdict(exit=-9 if reason or code is None else code, reason=reason, duration_s=took_s)
        return settle(verdict, out.output, err.output, timeout_s, self.limits)

    async def _cut(self, process: asyncio.subprocess.Process, out: _Marked, err: _Marked) -> None:
        """End what was asked for, and read to its end if the process goes on; otherwise that is closed."""

    async def _abandon(self) -> None:
        """End what was asked for, and the process."""
        await self.close()

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await end(process)


class Shell(Conversation):
    """A bash that keeps directory, variables and background jobs between commands."""

    def __init__(self, container: Container, limits: SandboxLimits, *, user: str | int | None = None) -> None:
        super().__init__(container, ("bash", "--noprofile", "--norc"), limits, user=user)
        self._pid = self._since = 0

    async def command(self, line: str, timeout_s: float) -> ExecResult:
        """Run a line of bash, and return its output, standard error within it.

        A command that reaches a limit is ended with all that it has started, and the bash goes on. Where it
        cannot, the next command starts a new one. The note says which.
        """
        if not self.alive:
            began = await self._say(_TRAP, "$$", _BEGINS_WITHIN_S)
            if not self.alive:
                return began
            self._pid = began.exit_code or 0
        # A process that began in the same tick as the last command ended would count as one of before.
        self._since = self.said
        wait = f'while {_NOW} && [ "${{agentenv_now/./}}" -le {self.said} ]; do :; done; '
        run = f"agentenv_line={shlex.quote(line)}; . /dev/fd/9 9<<<{shlex.quote(_EVAL)} </dev/null 2>&1; "
        result = await self._say(wait + run, "$?", timeout_s)
        if result.status in ("ok", "error") and self.alive:
            return result
        kept = "all that the command had started was ended; directory and variables of the shell are kept"
        lost = "the shell was restarted, so its directory and variables are lost"
        return replace(result, note=f"{result.note or 'the shell ended'}; {kept if self.alive else lost}")

    async def _say(self, text: str, number: str, timeout_s: float) -> ExecResult:
        """Let the bash run text, and say a number and the time at which it has ended."""
        mark = f"AGENTENV_END_{secrets.token_hex(8)}"
        said = f"printf '%s %s\\n' {mark} {number}; {{ {_NOW}; }} 2>/dev/null; "
        said += f"printf '%s %s\\n' {mark} \"${{agentenv_now/./}}\" >&2\n"
        return await self.ask((text + said).encode(errors="replace"), mark.encode(), timeout_s)

    async def _cut(self, process: asyncio.subprocess.Process, out: _Marked, err: _Marked) -> None:
        await self._end_command(f"kill -{_CUT} $SHELL_PID; ")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOES_ON_WITHIN_S):
                await asyncio.gather(
                    out.read(process.stdout, keeps=False), err.read(process.stderr, keeps=False)
                )
        if out.code is None:  # bash itself computes, or goes on with the next command of the line
            await self._end_command("kill -9 $SHELL_PID; ")

    async def _abandon(self) -> None:
        with contextlib.suppress(SandboxCrashed):
            await self._end_command("kill -9 $SHELL_PID; ")
        await self.close()

    async def _end_command(self, first: str) -> None:
        """End what the bash has started since the last command ended, as root."""
        values = (f"SHELL_PID={self._pid}", f"SINCE={self._since}")
        await self.container.run(("env", *values, "sh", "-c", f"{first}{END_SINCE}"))


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
    """The part of a stream that ends with a mark and a number."""

    def __init__(self, mark: bytes, limits: SandboxLimits) -> None:
        self.output = Output(limits.output_bytes)
        self.code: int | None = None
        self._mark, self._limits, self._held = mark, limits, b""

    async def read(self, stream: asyncio.StreamReader | None, *, keeps: bool = True) -> None:
        """Read up to the mark, or to the end of the stream; may go on where it was cancelled.

        Raises:
            Flood: There is more than the allowed output, which is kept.
        """
        assert stream is not None
        while self.code is None and (data := await stream.read(1 << 16)):
            self._held += data
            before, found, after = self._held.partition(self._mark)
            if found and b"\n" in after:
                said = after.split(b"\n", 1)[0].strip()
                self.code = int(said) if said.isdigit() else 0
                self._held = before
                break
            # The end may hold the beginning of the mark, so it is kept for the next look.
            ready = len(before) if found else max(len(self._held) - len(self._mark) - 8, 0)
            if keeps:
                self.output.add(self._held[:ready])
            self._held = self._held[ready:]
            if keeps and self.output.total > self._limits.max_output_bytes:
                raise Flood
        if keeps:
            self.output.add(self._held)
            self._held = b""
