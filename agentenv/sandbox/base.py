"""What every sandbox offers: fresh executions, files, sessions; and how one is made.

What the code did never raises: it comes back as an `ExecResult`. Infrastructure that fails raises
`SandboxUnavailable` or `SandboxCrashed`, which abort an episode instead of punishing the model.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from agentenv.core.errors import UsageError
from agentenv.core.execution import ExecResult, ExecStatus
from agentenv.sandbox import checks
from agentenv.sandbox.request import ExecRequest, SandboxLimits

__all__ = ["ExecResult", "ExecStatus", "Sandbox", "SandboxLimits", "Session", "Workspace", "create"]


class Workspace(ABC):
    """What a sandbox and a session have in common: run things and move files.

    A backend implements `execute` and the files; the arguments of a call are looked at here.
    """

    limits: SandboxLimits
    """What one execution may use."""

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
        request = ExecRequest(
            code=checks.clean_code(code),
            timeout_s=checks.clean_timeout(timeout_s, (limits or self.limits).timeout_s),
            files=checks.clean_files(files),
            env=checks.clean_environment(env),
            stdin=checks.clean_input(stdin),
            limits=limits,
            echo=echo,
        )
        return await self.execute(request)

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
        request = ExecRequest(
            command=checks.clean_command(cmd),
            timeout_s=checks.clean_timeout(timeout_s, (limits or self.limits).timeout_s),
            files=checks.clean_files(files),
            env=checks.clean_environment(env),
            stdin=checks.clean_input(stdin),
            limits=limits,
        )
        return await self.execute(request)

    @abstractmethod
    async def execute(self, request: ExecRequest) -> ExecResult:
        """Run what has been looked at; for backends. Callers use `run_code` and `exec`."""

    @abstractmethod
    async def read_file(self, path: str) -> bytes:
        """Return a file of the working directory.

        Raises:
            FileNotFoundError: There is no such file.
            UsageError: The path leads out of the working directory.
        """

    @abstractmethod
    async def write_file(self, path: str, data: str | bytes) -> None:
        """Put a file into the working directory."""

    @abstractmethod
    async def start(self) -> None:
        """Start now, so that the first call need not.

        Raises:
            SandboxUnavailable: It cannot be had here; the message says what to do.
        """

    @abstractmethod
    async def close(self) -> None:
        """Give everything back; may be called twice."""

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()


class Session(Workspace):
    """State kept between calls: one process, one working directory.

    The process reports its own steps, so code in it can lie about its own exit codes: score with a
    fresh execution. A session ends with a time-out, a crash or a limit; later calls say so.
    """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """True between the start of the process and its end."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """True once the process has ended, for whatever reason."""


class Sandbox(Workspace):
    """Where untrusted code runs, each time in a fresh process and a clean directory.

    Files given to `write_file` are there in every later execution. Files that an execution leaves
    are not: `read_file` finds those of the last execution until the next one.
    """

    @property
    @abstractmethod
    def description(self) -> str:
        """Backend and tier, such as "local (namespace)"."""

    @abstractmethod
    def session(self) -> Session:
        """Return a session, to be used with `async with`."""

    @abstractmethod
    def lease(self) -> AbstractAsyncContextManager[Sandbox]:
        """Lend a clean sandbox that shares this one's workers; one for each episode.

        Its files and sessions end with it; this one stays.
        """

    @abstractmethod
    async def reset(self) -> None:
        """Forget every file and end every session."""


_BACKENDS = {
    "auto": ("agentenv.sandbox.local.backend", "LocalSandbox"),
    "local": ("agentenv.sandbox.local.backend", "LocalSandbox"),
    "e2b": ("agentenv.sandbox.e2b.backend", "E2BSandbox"),
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
        raise UsageError(f"unknown sandbox backend {backend!r}", remedy=f"there are: {known}")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"size must be a whole number of at least 1, not {size!r}")
    module, name = _BACKENDS[backend]
    make = getattr(importlib.import_module(module), name)
    try:
        return make(size=size, limits=limits or SandboxLimits(), **options)
    except TypeError as error:
        raise UsageError(f"sandbox backend {backend!r}: {error}") from error
