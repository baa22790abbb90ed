"""The protocol of a sandbox, which runs code that a model wrote, and the result of an execution.

`agentenv.sandbox` implements the protocols. Environments and tools that run code depend on these
protocols only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias, runtime_checkable

__all__ = [
    "AgentHost",
    "ExecResult",
    "ExecStatus",
    "SandboxProtocol",
    "SessionProtocol",
    "WorkspaceProtocol",
]

ExecStatus: TypeAlias = Literal["ok", "error", "timeout", "memory", "output_limit", "killed"]
"""How an execution ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The result of one execution."""

    status: ExecStatus
    """How the execution ended. `ok` is exit code 0, `error` any other exit code; `killed` is a signal that
    the sandbox did not send; the others name the limit that ended it."""
    stdout: str = ""
    """Standard output. Output over the limit is cut to its head and tail, with a marker between them."""
    stderr: str = ""
    exit_code: int | None = None
    """Exit code of the process, negative if a signal ended it; None if it could not be read."""
    truncated: bool = False
    """True if `stdout` or `stderr` was cut."""
    duration_s: float = 0.0
    """Seconds from the start of the code to its end."""
    queue_s: float = 0.0
    """Seconds spent waiting for a free worker and a free processor; the time limit does not include them."""
    max_rss_bytes: int = 0
    cpu_s: float = 0.0
    stdout_bytes: int = 0
    """Number of bytes that the code wrote to standard output, before any cut."""
    stderr_bytes: int = 0
    files: Mapping[str, bytes] | None = None
    """Files that the execution created or changed in its working directory; None if the sandbox does not
    collect them."""
    note: str = ""
    """A remark of the sandbox about the end, for instance which limit was reached."""

    @property
    def ok(self) -> bool:
        """True if the code ran to its end with exit code 0."""
        return self.status == "ok"

    def text(self) -> str:
        """Return stdout, stderr and the note as one text for a model."""
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n")]
        if self.note and self.status not in ("ok", "error"):
            parts.append(f"[{self.note}]")
        return "\n".join(part for part in parts if part)


class WorkspaceProtocol(Protocol):
    """The methods that a sandbox and a session share; `agentenv.sandbox.Workspace` documents them."""

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
        """Run a command, which is a list of arguments or a line for `/bin/sh`."""
        ...

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file in the working directory."""
        ...

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file into the working directory."""
        ...

    async def start(self) -> None:
        """Start the processes now, so that the first call does not wait for them."""
        ...

    async def close(self) -> None:
        """Release all processes and files; may be called twice."""
        ...

    async def __aenter__(self) -> Self:
        """Start and return the workspace."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the workspace."""
        ...


class SessionProtocol(WorkspaceProtocol, Protocol):
    """A workspace that keeps its state between calls; see `agentenv.sandbox.Session`."""

    @property
    def alive(self) -> bool:
        """True between the start of the process and its end."""
        ...

    @property
    def ended(self) -> bool:
        """True once the process has ended, for any reason."""
        ...


class SandboxProtocol(WorkspaceProtocol, Protocol):
    """A workspace that runs each call in a clean directory; see `agentenv.sandbox.Sandbox`."""

    def session(self) -> SessionProtocol:
        """Return a new session, to be used with `async with`."""
        ...


@runtime_checkable
class AgentHost(Protocol):
    """A sandbox that can run an agent with a loop of its own, which asks the model from inside."""

    async def run_agent_program(
        self, command: Sequence[str], *, url: str, variables: Mapping[str, str], work: Path, home: Path
    ) -> ExecResult:
        """Run an agent to its end; of this machine it reaches only the model at `url`.

        Args:
            command: the program and its arguments.
            url: address of the model.
            variables: environment variables of the program.
            work: workspace of the episode, which is copied in and back.
            home: home of the agent, which is copied in.

        Raises:
            SandboxError: The sandbox failed, so the episode is aborted.
        """
        ...
