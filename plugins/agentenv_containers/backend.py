"""The sandboxes `podman:IMAGE` and `docker:IMAGE`: code, commands and agents in containers."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from agentenv.core import SandboxCrashed, SandboxUnavailable, UsageError
from agentenv.sandbox import (
    BackendFinding,
    ExecRequest,
    ExecResult,
    Sandbox,
    SandboxDiagnosis,
    SandboxLimits,
    Session,
    as_bytes,
    clean_path,
)
from agentenv_containers.agents import play_agent
from agentenv_containers.container import Container, ContainerSettings, NotStarted, tar_of
from agentenv_containers.runtime import Runtime
from agentenv_containers.runtime_check import check, lacks
from agentenv_containers.shell import Python

__all__ = ["DOCKER", "PODMAN", "ContainerBackend", "ContainerSandbox"]

_NOBODY = "65534:65534"
_CLEAN = (
    "kill -9 -1 2>/dev/null; chmod -R u+rwx /work /tmp /dev/shm 2>/dev/null; "
    "find /work /tmp /dev/shm -mindepth 1 -delete && tar -xmf - --no-same-owner -C /work; "
    "code=$?; cat >/dev/null; exit $code"
)
_ENV = {"HOME": "/work", "LANG": "C.UTF-8", "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"} | {  # noqa: S108
    "PYTHONUNBUFFERED": "1",  # these two as in the local jail
    "PYTHONIOENCODING": "utf-8:backslashreplace",
}
_OVERHEAD = 2
"""Processes besides those of the code: process 1, and the shell that sets limits."""


class Pool:
    """The containers of one sandbox, which are used again once they are clean.

    Args:
        runtime: the runtime.
        settings: of each container.
        size: largest number of leases at once; the sessions of a lease have further containers.
    """

    def __init__(self, runtime: Runtime, settings: ContainerSettings, size: int) -> None:
        self.runtime, self.settings = runtime, settings
        self.room = asyncio.Semaphore(size)
        self._idle: list[Container] = []
        self._all: set[Container] = set()

    async def take(self) -> Container:
        """Return an idle container, or start one."""
        if self._idle:
            return self._idle.pop()
        container = Container(self.runtime, self.settings)
        self._all.add(container)
        try:
            await container.start()
        except BaseException:
            self._all.discard(container)
            raise
        return container

    async def give_back(self, container: Container, *, reuse: bool) -> None:
        """Keep a container for the next use, or remove it."""
        if reuse and not container.gone and container in self._all:
            self._idle.append(container)
            return
        self._all.discard(container)
        await container.stop()

    async def close(self) -> None:
        """Remove every container."""
        rest, self._all, self._idle = list(self._all), set(), []
        if rest:
            await self.runtime.remove(*(container.name for container in rest))


class ContainerSandbox(Sandbox):
    """Runs code in containers of an image.

    Each lease has a container of its own; its executions run one after another, each in a cleaned one.

    Args:
        runtime: podman or docker.
        image: name of an image that this machine has, with `sh`, `tar` and `find`.
        size: largest number of leases at once.
        limits: limits of one execution.
        network: `none`, or `open` for the internet.
        cpus: processors that a container may use at once; None means all.
        python: interpreter in the image that runs code.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        image: str = "",
        size: int = 4,
        limits: SandboxLimits | None = None,
        network: str = "none",
        cpus: str | float | None = None,
        python: str = "python3",
    ) -> None:
        if not image:
            raise UsageError(f"{runtime.program} needs an image", remedy=f"{runtime.program}:IMAGE")
        self.limits = limits or SandboxLimits()
        self._runtime, self._python = runtime, python
        settings = ContainerSettings(
            image=image,
            network=network,
            env=_ENV,
            cpus=None if cpus is None else float(cpus),
            memory_bytes=self.limits.memory_bytes,
            max_processes=self.limits.max_processes + _OVERHEAD,
            confined=self.limits,
        )
        self._pool = Pool(runtime, settings, int(size))
        self._closed = False
        self._new_workspace()

    def _new_workspace(self) -> None:
        self._container: Container | None = None
        self._files: dict[str, bytes] = {}
        self._sessions: list[ContainerSession] = []
        self._turn = asyncio.Lock()
        self._leased = False

    @property
    def description(self) -> str:
        """Name of the backend and its image."""
        return f"{self._runtime.program} ({self._pool.settings.image})"

    @property
    def image(self) -> str:
        """Name of the image."""
        return self._pool.settings.image

    async def start(self) -> None:
        """Start the first container.

        Raises:
            SandboxUnavailable: There is no such image, or no container can be started.
        """
        if not await self._runtime.has_image(self.image):
            raise SandboxUnavailable(
                f"{self._runtime.program} has no image {self.image!r} on this machine",
                remedy=f"build it, or run `{self._runtime.program} pull {self.image}`",
            )
        await self.here()

    async def here(self) -> Container:
        """Return this workspace's container, which the first call takes from the pool."""
        if self._closed:
            raise UsageError("the sandbox is closed", remedy="make a new one with agentenv.sandbox.create()")
        if self._container is not None and self._container.gone:
            await self._drop()
        if self._container is None:
            self._container = await self._pool.take()
        return self._container

    async def execute(self, request: ExecRequest) -> ExecResult:
        """Run code or a command in a cleaned container, after the executions before it."""
        limits = self.limits if request.limits is None else request.limits.within(self.limits)
        files = self._files | request.files
        command = request.command
        if command is None and request.echo:
            return await self._echo(request)
        if command is None:
            files = {**files, "main.py": request.code.encode("utf-8", errors="replace")}
            command = [self._python, "-B", "main.py"]
        asked = asyncio.get_running_loop().time()
        async with self._turn:
            queue_s = asyncio.get_running_loop().time() - asked
            run = partial(
                Container.exec,
                command=command,
                timeout_s=request.timeout_s,
                limits=limits,
                env=request.env,
                stdin=request.stdin,
                capped=True,
                ends_others=True,
            )
            try:
                result = await run(await self._cleaned(files))
            except NotStarted:  # what the last execution left holds the container's processes
                await self._drop()
                result = await run(await self._cleaned(files))
        return replace(result, queue_s=queue_s)

    async def _echo(self, request: ExecRequest) -> ExecResult:
        """Run code that echoes its last expression, in a Python that is asked once."""
        async with self._turn:
            container = await self._cleaned(self._files | request.files)
            python = Python(container, self.limits, self._python)
            try:
                result = await python.run(request)
            finally:
                await python.close()
            if result.status not in ("ok", "error"):
                await self._drop()
        return result

    async def _cleaned(self, files: Mapping[str, bytes]) -> Container:
        """Return a container without processes, with these files alone in its directories."""
        data = tar_of(files)
        container = await self.here()
        try:
            await container.run(_CLEAN, stdin=data, user=_NOBODY)
        except SandboxCrashed:  # what the last execution left cannot be removed; a new container has nothing
            await self._drop()
            container = await self.here()
            await container.run(_CLEAN, stdin=data, user=_NOBODY)
        return container

    async def _drop(self) -> None:
        container, self._container = self._container, None
        if container is not None:
            await self._pool.give_back(container, reuse=False)

    async def read_file(self, path: str) -> bytes:
        """Return a file that the last execution left, or one that `write_file` wrote."""
        clean = clean_path(path)
        container = self._container
        if container is not None and not container.gone:
            found = await container.get(f"/work/{clean}", user=_NOBODY)
            if found is not None:
                return found
        if clean in self._files:
            return self._files[clean]
        raise FileNotFoundError(f"no file {path!r} in the sandbox's working directory")

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file into the working directory of every later execution."""
        self._files[clean_path(path)] = as_bytes(data, f"file {path!r}")

    def session(self) -> ContainerSession:
        """Return a session in a container of its own."""
        session = ContainerSession(self._pool, self.limits, self._python, self._files)
        self._sessions.append(session)
        return session

    async def run_agent_program(
        self, command: Sequence[str], *, url: str, variables: Mapping[str, str], work: Path, home: Path
    ) -> ExecResult:
        """Run an agent in a container of its own; see `agentenv_containers.agents.play_agent`."""
        return await play_agent(
            self._runtime, self._pool.settings, command, url=url, variables=variables, work=work, home=home
        )

    @asynccontextmanager
    async def lease(self) -> AsyncGenerator[ContainerSandbox]:
        """Lend a sandbox with a container of its own; at most `size` of them exist at the same time."""
        lent = object.__new__(ContainerSandbox)
        vars(lent).update(vars(self))
        lent._new_workspace()
        lent._leased = True
        async with self._pool.room:
            try:
                yield lent
            finally:
                await asyncio.shield(lent.close())

    async def reset(self) -> None:
        """Remove all files and end all sessions."""
        sessions, self._sessions, self._files = self._sessions, [], {}
        for session in sessions:
            await session.close()
        if self._container is not None:
            await self._cleaned({})

    async def close(self) -> None:
        """Remove all containers; a lent one is cleaned and kept for the next lease instead."""
        if self._closed:
            return
        try:
            with contextlib.suppress(SandboxCrashed):
                await self.reset()
            container, self._container = self._container, None
            if container is not None and self._leased:
                await self._pool.give_back(container, reuse=True)
        finally:
            self._closed = True
            if not self._leased:
                await self._pool.close()


class ContainerSession(Session):
    """A session in a container of its own; see `Session`."""

    def __init__(self, pool: Pool, limits: SandboxLimits, python: str, files: Mapping[str, bytes]) -> None:
        self.limits = limits
        self._pool, self._python_name, self._files = pool, python, dict(files)
        self._container: Container | None = None
        self._python: Python | None = None
        self._why = ""
        self._turn = asyncio.Lock()

    @property
    def alive(self) -> bool:
        """True between the start of the container and the session's end."""
        return self._container is not None and not self._why

    @property
    def ended(self) -> bool:
        """True once the session has ended."""
        return bool(self._why)

    async def start(self) -> None:
        """Start the container."""
        if self._container is None and not self._why:
            self._container = await self._pool.take()
            await self._container.run(_CLEAN, stdin=tar_of(self._files), user=_NOBODY)

    async def execute(self, request: ExecRequest) -> ExecResult:
        """Run Python code in the session's process, or a command in its directory."""
        async with self._turn:
            await self.start()
            container = self._container
            if container is None or self._why:
                note = f"the session has ended ({self._why}) and its state is lost; open a new one"
                return ExecResult(status="killed", stderr=note + "\n", note=note)
            if request.files:
                await container.put(request.files, "/work", user=_NOBODY)
            if request.command is not None:
                result = await container.exec(
                    request.command,
                    timeout_s=request.timeout_s,
                    limits=self.limits,
                    env=request.env,
                    stdin=request.stdin,
                    capped=True,
                )
                over = container.gone
            else:
                if self._python is None:
                    self._python = Python(container, self.limits, self._python_name)
                result = await self._python.run(request)
                over = not self._python.alive
            if over:
                await self._end(result.note or "its process ended")
                result = replace(result, note=f"{result.note}; the session has ended and its state is lost")
        return result

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file in the working directory."""
        clean = clean_path(path)
        found = None
        if self._container is not None and not self._why:
            found = await self._container.get(f"/work/{clean}", user=_NOBODY)
        elif self._container is None:
            found = self._files.get(clean)
        if found is None:
            raise FileNotFoundError(f"no file {path!r} in the session's working directory")
        return found

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file into the working directory."""
        name, content = clean_path(path), as_bytes(data, f"file {path!r}")
        if self._container is None:
            self._files[name] = content
        else:
            await self._container.put({name: content}, "/work", user=_NOBODY)

    async def _end(self, why: str) -> None:
        self._why = self._why or why
        python, self._python = self._python, None
        container, self._container = self._container, None
        if python is not None:
            await python.close()
        if container is not None:
            await self._pool.give_back(container, reuse=False)

    async def close(self) -> None:
        """Remove the container; may be called twice."""
        await self._end("closed")


class ContainerBackend:
    """What stands in the entry-point group `agentenv.sandboxes`: it makes sandboxes of one runtime.

    Args:
        program: `podman` or `docker`.
    """

    def __init__(self, program: str) -> None:
        self.runtime = Runtime(program)

    PROMISES = (
        (
            "own root, read-only but for /work, /tmp and /dev/shm",
            "memory, processes and processors by cgroups",
            "no network",
            "no capabilities, and the runtime's seccomp profile",
        ),
        ("the kernel is shared: a hole in it is a way out", "processes stay until the execution ends"),
    )
    """What the sandbox holds and what it leaves open."""

    def __call__(self, **options: object) -> ContainerSandbox:
        """Return a sandbox; the options are those of `ContainerSandbox`."""
        return ContainerSandbox(self.runtime, **options)  # type: ignore[arg-type]

    async def diagnose(self) -> SandboxDiagnosis:
        """Return whether the runtime runs containers here, for `agentenv doctor`."""
        program = self.runtime.program
        if lack := await asyncio.to_thread(lacks, self.runtime):
            there = "" if shutil.which(program) is None else "installed, but "
            finding = BackendFinding(program, False, f"{there}{lack}")
        else:
            finding = BackendFinding(program, True, f"runs; use {program}:IMAGE", *self.PROMISES)
        return SandboxDiagnosis(None, (finding,))

    async def check(self) -> None:
        """Run one container.

        Raises:
            SandboxUnavailable: This machine cannot run one; the remedy says what to do.
        """
        await asyncio.to_thread(check, self.runtime)

    async def sweep(self, *, everything: bool = False) -> list[str]:
        """Remove the containers that dead runs left, or all of ours; return their names."""
        return await self.runtime.sweep(everything=everything)


PODMAN = ContainerBackend("podman")
DOCKER = ContainerBackend("docker")
