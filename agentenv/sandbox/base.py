"""What every sandbox offers: fresh executions, files, sessions; and how one is made.

What the code did never raises: it comes back as an `ExecResult`. Infrastructure that fails raises
`SandboxUnavailable` or `SandboxCrashed`, which abort an episode instead of punishing the model.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, fields
from math import isfinite
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from agentenv.errors import UsageError

__all__ = ["ExecResult", "ExecStatus", "Sandbox", "SandboxLimits", "Session", "Workspace", "create"]

from typing import Literal, TypeAlias

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


_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one execution may use.

    Raises:
        UsageError: A limit is not a positive number.
    """

    timeout_s: float = 5.0
    """Wall time, from the start of the code."""
    cpu_s: int = 10
    """Processor time of one process, or twice the time limit where that is more."""
    address_space_bytes: int = 512 * _MIB
    """Of one process. Numerical libraries map much more than they use."""
    memory_bytes: int = 1024 * _MIB
    """Of the whole execution, looked at every 100 ms."""
    max_processes: int = 32
    """Processes and threads together."""
    max_open_files: int = 128
    work_bytes: int = 32 * _MIB
    """In the working directory, and again in /tmp."""
    shm_bytes: int = 16 * _MIB
    max_inodes: int = 8192
    max_file_bytes: int = 32 * _MIB
    output_bytes: int = 64 * 1024
    """Kept of stdout, and again of stderr: the head and the tail."""
    max_output_bytes: int = 8 * _MIB
    """An execution that writes more is ended."""
    collect_bytes: int = 8 * _MIB
    """Of the files that an execution leaves, kept for `read_file`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole or field.name == "timeout_s") or not isfinite(value) or value <= 0:
                raise UsageError(f"{field.name} must be a positive number, not {value!r}")

    def as_dict(self) -> dict[str, int]:
        """Return the limits that the jail enforces."""
        values = asdict(self)
        del values["timeout_s"]
        return values


class Workspace(Protocol):
    """What a sandbox and a session have in common: run things and move files."""

    async def run_code(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        files: Mapping[str, str | bytes] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        limits: SandboxLimits | None = None,
        echo: bool = False,
    ) -> ExecResult:
        """Run Python code.

        Args:
            code: Source text, run as the file `main.py` in the working directory.
            timeout_s: Wall time from the start of the code; the sandbox's own limit when None.
            files: Put into the working directory first, by relative path.
            env: Added to the environment, which has nothing of the host's.
            stdin: What the code can read from standard input; empty when None.
            limits: Stricter limits for this call; what is laxer than the sandbox's has no effect.
            echo: Show the value of a last expression, as Python's prompt does.

        Raises:
            UsageError: An argument has the wrong type or range.
            SandboxCrashed: The sandbox itself failed.
        """
        ...

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        files: Mapping[str, str | bytes] | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Run a command: a list of arguments, or a line for `/bin/sh`."""
        ...

    async def read_file(self, path: str) -> bytes:
        """Return a file of the working directory.

        Raises:
            FileNotFoundError: There is no such file.
            UsageError: The path leads out of the working directory.
        """
        ...

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Put a file into the working directory."""
        ...

    async def close(self) -> None:
        """Give everything back; may be called twice."""
        ...


@runtime_checkable
class Session(Workspace, Protocol):
    """State kept between calls: one process, one working directory.

    The process reports its own steps, so code in it can lie about its own exit codes: score with a
    fresh execution. A session ends with a time-out, a crash or a limit; later calls say so.
    """

    @property
    def alive(self) -> bool:
        """True between the start of the process and its end."""
        ...

    @property
    def ended(self) -> bool:
        """True once the process has ended, for whatever reason."""
        ...

    async def __aenter__(self) -> Self:
        """Start the session."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Close the session."""
        ...


@runtime_checkable
class Sandbox(Workspace, Protocol):
    """Where untrusted code runs, each time in a fresh process and a clean directory.

    Files given to `write_file` are there in every later execution. Files that an execution leaves
    are not: `read_file` finds those of the last execution until the next one.
    """

    @property
    def description(self) -> str:
        """Backend and tier, such as "local (namespace)"."""
        ...

    def session(self) -> Session:
        """Return a session, to be used with `async with`."""
        ...

    def lease(self) -> AbstractAsyncContextManager[Sandbox]:
        """Lend a clean sandbox that shares this one's workers; one for each episode.

        Its files and sessions end with it; this one stays.
        """
        ...

    async def reset(self) -> None:
        """Forget every file and end every session."""
        ...

    async def __aenter__(self) -> Self:
        """Start the sandbox.

        Raises:
            SandboxUnavailable: It cannot be had here; the message says what to do.
        """
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Close the sandbox."""
        ...


_BACKENDS = {
    "auto": ("agentenv.sandbox.local", "LocalSandbox"),
    "local": ("agentenv.sandbox.local", "LocalSandbox"),
    "e2b": ("agentenv.sandbox.e2b", "E2BSandbox"),
    "none": ("agentenv.sandbox.none", "UnsafeSandbox"),
}


def create(
    backend: str = "auto", *, size: int = 4, limits: SandboxLimits | None = None, **options: object
) -> Sandbox:
    """Return a sandbox, to be used with `async with`.

    Args:
        backend: "auto" or "local" for the strongest isolation that works on this machine,
            "namespace" or "landlock" for one tier of it, "e2b" for the cloud, and "none" for no
            isolation at all.
        size: Workers kept warm, or cloud sandboxes at most.
        limits: What one execution may use.
        **options: For the backend: `preload`, `packages`, `python`, `concurrency` (local);
            `template`, `api_key` (e2b).

    Raises:
        UsageError: The backend has no such name, or an option is wrong.
        DependencyMissing: The backend's package is not installed.
    """
    if backend in ("namespace", "landlock"):
        backend, options = "local", {**options, "tier": backend}
    if backend not in _BACKENDS:
        known = ", ".join([*_BACKENDS, "namespace", "landlock"])
        raise UsageError(f"unknown sandbox backend {backend!r}; there are: {known}")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"size must be a whole number of at least 1, not {size!r}")
    module, name = _BACKENDS[backend]
    make = getattr(importlib.import_module(module), name)
    try:
        return make(size=size, limits=limits or SandboxLimits(), **options)
    except TypeError as error:
        raise UsageError(f"sandbox backend {backend!r}: {error}") from error
