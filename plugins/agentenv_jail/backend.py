"""The default backend: a jail on this machine, with the strongest tier that works.

It needs no installation, because namespaces, Landlock and seccomp are part of the kernel and are used through
the standard library. docs/security.md describes the threat model and the limits.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from agentenv.core import (
    ExecResult,
    SandboxCrashed,
    SandboxUnavailable,
    UsageError,
    logger,
    open_files_left,
)
from agentenv.sandbox import (
    MAX_JOB_BYTES,
    ExecRequest,
    Sandbox,
    SandboxLimits,
    as_bytes,
    clean_path,
    oversized,
)
from agentenv_jail.layout import JailLayout
from agentenv_jail.pool import Pool, Tier
from agentenv_jail.running import Lost, pack, run
from agentenv_jail.session import LocalSession
from agentenv_jail.tiers import FIXES, TIERS, diagnose

__all__ = ["LocalSandbox"]

log = logger("agentenv.jail")

_TRIES = 3


LEAST_DESCRIPTORS = 96
"""Limit of open files with which the jail can be built, whose process has the limit of ours. Measured: 96 is
enough and 80 is not."""
DESCRIPTORS = 8
"""Open files of a worker: its sockets and its handle, and the pipes of an execution and of the next one."""


class LocalSandbox(Sandbox):
    """A sandbox on this machine, whose workers are started in advance.

    Args:
        size: Number of workers kept ready.
        limits: Limits of one execution; None means the defaults.
        tier: "namespace" or "landlock"; None means the strongest tier that works.
        concurrency: Number of executions that may run at the same time. The default is the number of
            processors, so that a time limit measures the code and not the wait for a processor.
        packages: Distributions that the code may import, together with their dependencies.
        preload: Modules to import once, before all executions. The code may import their packages too.
        python: Path of the interpreter that runs the code; None means the one that runs this process.

    Raises:
        UsageError: An option is out of range, or a package is not installed.
    """

    def __init__(
        self,
        *,
        size: int = 4,
        limits: SandboxLimits | None = None,
        tier: Tier | None = None,
        concurrency: int | None = None,
        packages: Sequence[str] = (),
        preload: Sequence[str] = (),
        python: str | None = None,
    ) -> None:
        if tier is not None and tier not in TIERS:
            raise UsageError(f"unknown sandbox tier {tier!r}", remedy=f"use one of: {', '.join(TIERS)}")
        self.limits = limits or SandboxLimits()
        self._size = size
        self._tiers: tuple[Tier, ...] = (tier,) if tier else TIERS
        self._at_once = concurrency or len(os.sched_getaffinity(0))
        self._gate = asyncio.Semaphore(self._at_once)
        self._layout = JailLayout.find(python, [*packages, *preload])
        self._preload = tuple(preload)
        self._pool: Pool | None = None
        self._starting = asyncio.Lock()
        self._leased = False
        self._closed = False
        self._forget()

    def _forget(self) -> None:
        self._files: dict[str, bytes] = {}
        self._left: Mapping[str, bytes] = {}
        self._sessions: list[LocalSession] = []

    diagnose = staticmethod(diagnose)
    """Try the tiers, for `agentenv doctor`."""

    @property
    def tier(self) -> Tier | None:
        """The tier in use; None before the start."""
        return self._pool.tier if self._pool else None

    @property
    def description(self) -> str:
        """Name of the backend and its tier."""
        return f"local ({self.tier or 'not started'})"

    async def start(self) -> None:
        """Build the jail and fork the first workers."""
        await self._started()

    async def _started(self) -> Pool:
        if self._closed:
            raise UsageError("the sandbox is closed", remedy="make a new one with agentenv.sandbox.create()")
        async with self._starting:
            if self._pool is None:
                self._pool = await self._first_that_works()
        return self._pool

    async def _first_that_works(self) -> Pool:
        wanted = max(self._size, self._at_once)
        most = _affordable(wanted)
        if most < wanted:  # nothing may ask for more workers than there is room for
            self._gate = asyncio.Semaphore(min(most, self._at_once))
        reasons: list[str] = []
        for tier in self._tiers:
            pool = Pool(
                size=min(most, self._size),
                most=most,
                limits=self.limits,
                tier=tier,
                layout=self._layout,
                preload=self._preload,
            )
            try:
                await pool.start()
                probe = ExecRequest(code="print(6 * 7)", timeout_s=30.0)
                result = await run(await pool.take(), pack(probe.job()), probe.timeout_s, self.limits)
                if result.stdout != "42\n":
                    raise SandboxCrashed(f"{tier}: the first execution failed: {result.text()}")
            except (SandboxUnavailable, SandboxCrashed, Lost) as error:
                reasons.append(str(error) or f"{tier}: the first execution was lost")
                pool.close()
            except BaseException:
                pool.close()
                raise
            else:
                return pool
        raise SandboxUnavailable(
            f"no isolation on this machine. {'; '.join(reasons)}", remedy=f"fix one: {' | '.join(FIXES)}"
        )

    async def execute(self, request: ExecRequest) -> ExecResult:
        """Run code or a command in a fresh process and a clean directory."""
        files = self._files | request.files
        payload = pack({**request.job(), "files": files})
        limits = request.limits.within(self.limits) if request.limits else self.limits
        pool = await self._started()
        if len(payload) > MAX_JOB_BYTES:
            return oversized(len(payload))
        loop = asyncio.get_running_loop()
        asked = loop.time()
        async with self._gate:
            for _ in range(_TRIES):
                worker = await pool.take()
                began = loop.time()
                try:
                    result = await run(worker, payload, request.timeout_s, limits)
                except Lost:
                    continue
                left = {name: data for name, data in (result.files or {}).items() if files.get(name) != data}
                self._left = left
                return replace(result, files=left, queue_s=began - asked)
        raise SandboxCrashed(
            f"{_TRIES} workers in a row were killed from outside before they reported a result"
        )

    async def read_file(self, path: str) -> bytes:
        """Return a file that the last execution left, or else one that `write_file` wrote."""
        clean = clean_path(path)
        for files in (self._left, self._files):
            if clean in files:
                return files[clean]
        raise FileNotFoundError(f"no file {path!r} in the sandbox's working directory")

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file into the working directory of every later execution."""
        if self._closed:
            raise UsageError("the sandbox is closed", remedy="make a new one with agentenv.sandbox.create()")
        clean = clean_path(path)
        self._files[clean] = as_bytes(data, f"file {path!r}")
        self._left = {name: left for name, left in self._left.items() if name != clean}

    def session(self, *, background: bool = False) -> LocalSession:
        """Return a new session, which starts with the files of this sandbox.

        Its processes are stopped between the steps, and go on with the next one.

        Args:
            background: let what a step started run on between the steps, within the session's limits.
        """
        files = dict(self._files)
        session = LocalSession(self._started, self._gate, self.limits, files, background=background)
        self._sessions = [opened for opened in self._sessions if not opened.closed]
        self._sessions.append(session)
        return session

    @asynccontextmanager
    async def lease(self) -> AsyncGenerator[LocalSandbox]:
        """Lend a clean sandbox that shares this one's workers."""
        pool = await self._started()
        # The copy shares the pool and the gate; `_forget` gives it files and sessions of its own.
        lent = object.__new__(type(self))
        vars(lent).update(vars(self))
        lent._forget()
        lent._pool = pool
        lent._leased = True
        try:
            yield lent
        finally:
            await lent.close()

    async def reset(self) -> None:
        """Remove all files and end all sessions."""
        for session in self._sessions:
            await session.close()
        self._forget()

    async def close(self) -> None:
        """End the sessions and, unless this sandbox is lent, the workers; may be called twice."""
        self._closed = True
        await self.reset()
        if self._pool is not None and not self._leased:
            pool, self._pool = self._pool, None
            pool.close()
            await pool.removed()


def _affordable(workers: int) -> int:
    """Return how many of these workers the limit of open files allows.

    The kernel drops descriptors that find no room when a message brings them, so a worker beyond the limit
    would never become ready, and nothing would say why.

    Raises:
        SandboxUnavailable: There is no room for a single worker; the message says how many files it needs.
    """
    left = open_files_left()
    if left is None:
        return workers
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < LEAST_DESCRIPTORS or left < DESCRIPTORS:
        needed = max(LEAST_DESCRIPTORS, limit - left + DESCRIPTORS)
        raise SandboxUnavailable(
            f"a sandbox needs {needed} open files here, and the limit is {limit}",
            remedy=f"raise it (ulimit -n {max(1024, needed)})",
        )
    found = min(workers, left // DESCRIPTORS)
    if found < workers:
        log.warning(
            "the sandbox has %d workers instead of %d: this process may open %d more files",
            found,
            workers,
            left,
        )
    return found
