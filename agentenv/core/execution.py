"""Running code that a model wrote, as environments and tools see it: a sandbox, and an execution's result.

`agentenv.sandbox` implements these protocols; an environment that runs code needs nothing more of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias

__all__ = ["ExecResult", "ExecStatus", "SandboxProtocol", "SessionProtocol", "WorkspaceProtocol"]

ExecStatus: TypeAlias = Literal["ok", "error", "timeout", "memory", "output_limit", "killed"]
"""How an execution ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What became of one execution."""

    status: ExecStatus
    """`ok`: exit code 0. `error`: any other exit code. `killed`: a signal that was not ours."""
    stdout: str = ""
    """Head and tail, with a marker between them, where the output was over its limit."""
    stderr: str = ""
    exit_code: int | None = None
    """As the kernel gave it; negative for a signal; None where the process cannot be asked."""
    truncated: bool = False
    """Some output was left out of `stdout` or `stderr`."""
    duration_s: float = 0.0
    """From the start of the code to its end."""
    queue_s: float = 0.0
    """Waiting for a free worker and a free processor; not part of the time limit."""
    max_rss_bytes: int = 0
    cpu_s: float = 0.0
    stdout_bytes: int = 0
    """Written by the code, before anything was left out."""
    stderr_bytes: int = 0
    files: Mapping[str, bytes] | None = None
    """Files that the execution made or changed in its working directory; None where not collected."""
    note: str = ""
    """What the sandbox has to say about the end: which limit, for instance."""

    @property
    def ok(self) -> bool:
        """True if the code ran to its end with exit code 0."""
        return self.status == "ok"

    def text(self) -> str:
        """Return stdout, stderr and the note as one text, as a tool shows it to a model."""
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n")]
        if self.note and self.status not in ("ok", "error"):
            parts.append(f"[{self.note}]")
        return "\n".join(part for part in parts if part)


class WorkspaceProtocol(Protocol):
    """What a sandbox and a session have in common; see `agentenv.sandbox.Workspace` for the arguments."""

    async def run_code(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        files: Mapping[str, str | bytes] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        echo: bool = False,
    ) -> ExecResult:
        """Run Python code."""
        ...

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        files: Mapping[str, str | bytes] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        """Run a command: a list of arguments, or a line for `/bin/sh`."""
        ...

    async def read_file(self, path: str) -> bytes:
        """Return a file of the working directory."""
        ...

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Put a file into the working directory."""
        ...

    async def start(self) -> None:
        """Start now, so that the first call need not."""
        ...

    async def close(self) -> None:
        """Give everything back; may be called twice."""
        ...

    async def __aenter__(self) -> Self:
        """Start."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        ...


class SessionProtocol(WorkspaceProtocol, Protocol):
    """State kept between calls; see `agentenv.sandbox.Session`."""

    @property
    def alive(self) -> bool:
        """True between the start of the process and its end."""
        ...

    @property
    def ended(self) -> bool:
        """True once the process has ended, for whatever reason."""
        ...


class SandboxProtocol(WorkspaceProtocol, Protocol):
    """Fresh executions in clean directories; see `agentenv.sandbox.Sandbox`."""

    def session(self) -> SessionProtocol:
        """Return a session, to be used with `async with`."""
        ...
