"""The interface of every sandbox (executions, files and sessions), and `create`, which makes one.

Errors in sandboxed code are returned in the `status` of an `ExecResult`, never raised. If the sandbox itself
fails, it raises `SandboxUnavailable` or `SandboxCrashed`. These abort the episode, so that the model is not
punished for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self
from urllib.parse import parse_qsl

from agentenv.core.errors import SandboxUnavailable, UsageError
from agentenv.core.execution import ExecResult, ExecStatus
from agentenv.core.registry import Registry
from agentenv.sandbox import checks
from agentenv.sandbox.request import ExecRequest, SandboxLimits

__all__ = [
    "AUTO",
    "ExecResult",
    "ExecStatus",
    "Sandbox",
    "SandboxLimits",
    "Session",
    "Workspace",
    "create",
    "sandbox_registry",
]


class Workspace(ABC):
    """The methods that a sandbox and a session share: they run code and commands, and read and write files.

    This class checks the arguments of `run_code` and `exec`. A backend implements `execute` and the files.
    """

    limits: SandboxLimits
    """Limits of one execution."""

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
            timeout_s: Time limit in seconds from the start of the code; None means the sandbox's own limit.
            files: Files by relative path, written into the working directory before the code starts.
            env: Variables to add to the environment, which contains none of the host's.
            stdin: Standard input of the code; None means empty.
            limits: Stricter limits for this call. A limit above the sandbox's own has no effect.
            echo: Print the value of the last expression, as Python's prompt does.

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
        """Run a command, which is a list of arguments or a line for `/bin/sh`.

        The other arguments and the errors are those of `run_code`.
        """
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
        """Run a request whose arguments were checked. Backends implement this; callers use `run_code`."""

    @abstractmethod
    async def read_file(self, path: str) -> bytes:
        """Return the content of a file in the working directory.

        Raises:
            FileNotFoundError: There is no such file.
            UsageError: The path leads out of the working directory.
        """

    @abstractmethod
    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file into the working directory."""

    @abstractmethod
    async def start(self) -> None:
        """Start the processes now, so that the first call does not wait for them.

        Raises:
            SandboxUnavailable: This machine does not offer the isolation; the message says what to do.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release all processes and files; may be called twice."""

    async def __aenter__(self) -> Self:
        """Start and return the workspace."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the workspace."""
        await self.close()


class Session(Workspace):
    """One process with one working directory, which keep their state between calls.

    The process reports its own exit codes, so code that runs in it can forge them: use a fresh execution of
    the sandbox for scoring. A time-out, a crash or a reached limit ends the session; the results of later
    calls say that it has ended.
    """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """True between the start of the process and its end."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """True once the process has ended, for any reason."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Refuse: a copy would share the process, and with it the state.

        Raises:
            TypeError: Always.
        """
        raise TypeError("a session of a sandbox cannot be copied, because its process cannot")


class Sandbox(Workspace):
    """Runs untrusted code, each time in a fresh process and a clean directory.

    Files written with `write_file` are present in every later execution. Files that an execution writes are
    not, but `read_file` returns them until the next execution.
    """

    @property
    @abstractmethod
    def description(self) -> str:
        """Name of the backend and its tier, such as "local (namespace)"."""

    @abstractmethod
    def session(self) -> Session:
        """Return a new session, to be used with `async with`."""

    @abstractmethod
    def lease(self) -> AbstractAsyncContextManager[Sandbox]:
        """Lend a clean sandbox that shares this one's workers, for example to one episode.

        The files and sessions of the lent sandbox end with the lease; this sandbox stays open.
        """

    @abstractmethod
    async def reset(self) -> None:
        """Remove all files and end all sessions."""


sandbox_registry: Registry[Callable[..., Sandbox]] = Registry(
    "agentenv.sandboxes", "sandbox backend", lambda loaded, _name, _value: loaded
)
"""The backends of the installed packages. Each makes a sandbox of `size`, `limits` and options of its own.

A backend can also have a coroutine `diagnose()`, which returns a `SandboxDiagnosis` for `agentenv doctor`.
"""


AUTO = "local"
"""The backend that "auto" means."""


def create(
    backend: str = "auto", *, size: int = 4, limits: SandboxLimits | None = None, **options: object
) -> Sandbox:
    """Return a sandbox, to be used with `async with`.

    Args:
        backend: "auto" or "local" for the strongest isolation that works on this machine, "namespace" or
            "landlock" for one tier of it, "podman:IMAGE" or "docker:IMAGE" for containers, "e2b" for the
            cloud, and "none" for no isolation at all. Options may stand behind it, as in
            "podman:IMAGE?network=open&size=8".
        size: Number of workers kept ready, or largest number of cloud sandboxes.
        limits: Limits of one execution; None means the defaults.
        **options: Options of the backend: `preload`, `packages`, `python`, `concurrency` (local);
            `template`, `api_key` (e2b); `network`, `cpus`, `python` (podman and docker).

    Raises:
        UsageError: There is no backend of this name, or an option is wrong.
        DependencyMissing: The backend needs a package that is not installed.
        SandboxUnavailable: The package of the local sandbox is not installed.
    """
    backend, _, more = backend.partition("?")
    options = {**dict(parse_qsl(more, keep_blank_values=True)), **options}
    if (given := str(options.pop("size", size))).isdecimal():
        size = int(given)
    name, _, image = backend.partition(":")
    if image:
        options["image"] = image
    if backend in ("namespace", "landlock"):
        name, options = AUTO, {**options, "tier": backend}
    elif backend == "auto":
        name = AUTO
    if name not in sandbox_registry:
        known = ", ".join(["auto", *sandbox_registry, "namespace", "landlock"])
        if name == AUTO:
            known = ", ".join(sandbox_registry)
            raise SandboxUnavailable(
                "the package of the local sandbox is not installed", remedy=f"use one of: {known}"
            )
        raise UsageError(f"unknown sandbox backend {backend!r}", remedy=f"use one of: {known}")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"size must be a whole number of at least 1, not {size!r}")
    try:
        return sandbox_registry[name](size=size, limits=limits or SandboxLimits(), **options)
    except TypeError as error:
        raise UsageError(f"sandbox backend {backend!r}: {error}") from error
