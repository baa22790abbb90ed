"""The cloud backend, which runs code in E2B's sandboxes through E2B's SDK.

1. Each execution gets a new code context, which is removed afterwards; a session keeps its context.
2. The SDK's time limit ends only the request. The backend then removes the context, which ends the code.
3. The SDK reports success if a stream breaks off. Therefore the code of each execution writes a random word
   at its end. If there is neither an error nor the word, the execution was lost.
4. A sandbox costs money while it exists, so sandboxes are reused, limited to `size`, and always killed.

The code runs in the same process that reports its result, so it can forge exit codes and results.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from agentenv.core import SandboxCrashed
from agentenv.sandbox import (
    BackendFinding,
    ExecRequest,
    ExecResult,
    Sandbox,
    SandboxDiagnosis,
    SandboxLimits,
    Session,
    clean_path,
)
from agentenv_e2b.cloud import HOME, Cloud, RemoteWorkspace

__all__ = ["E2BSandbox", "E2BSession"]

_SHOW = (
    "_last = _one is _tree.body[-1] and isinstance(_one, __import__('ast').Expr); "
    "_part = __import__('ast').Interactive([_one]) if _last else __import__('ast').Module([_one], []); "
    "exec(compile(_part, 'main.py', 'single' if _last else 'exec'))"
)
"""Code that runs one statement; the last one, if it is an expression, runs as at Python's prompt."""


class E2BSandbox(RemoteWorkspace, Sandbox):
    """Sandboxes in E2B's cloud.

    Args:
        size: Largest number of cloud sandboxes; each lease uses one.
        limits: Limits of one execution. Only those for time and output have an effect; the template sets
            the others.
        template: Name of E2B's template; None means the code interpreter's default.
        api_key: API key; None means the environment variable E2B_API_KEY.
        lifetime_s: Seconds without use after which E2B ends a sandbox by itself.

    Raises:
        DependencyMissing: The SDK is not installed.
    """

    def __init__(
        self,
        *,
        size: int = 4,
        limits: SandboxLimits | None = None,
        template: str | None = None,
        api_key: str | None = None,
        lifetime_s: float = 300.0,
    ) -> None:
        options = {name: value for name, value in (("template", template), ("api_key", api_key)) if value}
        super().__init__(Cloud(size, options, lifetime_s), limits or SandboxLimits())
        self._sessions: list[E2BSession] = []
        self._written: set[str] = set()
        self._leased = False

    @staticmethod
    async def diagnose() -> SandboxDiagnosis:
        """Return whether there is a key, for `agentenv doctor`; a try would cost money."""
        has_key = bool(os.environ.get("E2B_API_KEY"))
        detail = "installed (not tried)" if has_key else "installed, but E2B_API_KEY is not set"
        return SandboxDiagnosis(None, (BackendFinding("e2b", has_key, detail),))

    @property
    def description(self) -> str:
        """Name of the backend."""
        return "e2b (cloud)"

    async def start(self) -> None:
        """Start the first sandbox."""
        await self.here()

    async def execute(self, request: ExecRequest) -> ExecResult:
        """Run Python code in a new context, or a command. Its files stay until the sandbox is reset."""
        for path, data in request.files.items():
            await self.write_file(path, data)
        if request.command is not None:
            return await self.remote_command(request)
        box = await self.here()
        context = await self.guard(box.create_code_context(cwd=HOME))
        try:
            result, _ = await self.remote_code(context, _source(request), request)
        finally:
            if self.remote is not None:
                with contextlib.suppress(Exception):
                    await asyncio.shield(box.remove_code_context(context))
        return result

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file into the working directory; `reset` removes it."""
        await super().write_file(path, data)
        self._written.add(clean_path(path))

    def session(self) -> E2BSession:
        """Return a session in this sandbox."""
        session = E2BSession(self)
        self._sessions.append(session)
        return session

    @asynccontextmanager
    async def lease(self) -> AsyncGenerator[E2BSandbox]:
        """Lend a separate cloud sandbox; at most `size` of them exist at the same time."""
        lent = object.__new__(E2BSandbox)
        vars(lent).update(vars(self))
        lent.remote, lent._sessions, lent._written, lent._leased = None, [], set(), True
        try:
            await lent.here()
            yield lent
        finally:
            await asyncio.shield(lent.close())

    async def reset(self) -> None:
        """End the sessions and empty the working directory."""
        for session in self._sessions:
            await session.close()
        self._sessions, self._written = [], set()
        if self.remote is not None:
            line = "find . -mindepth 1 -maxdepth 1 -exec rm -rf {} +"
            emptied = await self.remote_command(ExecRequest(command=["/bin/sh", "-c", line], timeout_s=30.0))
            if not emptied.ok:
                await self.lose()

    async def close(self) -> None:
        """Kill all cloud sandboxes; a lent one is emptied and kept for the next lease instead."""
        if not self._leased:
            await self.cloud.close()
            self.remote = None
            return
        with contextlib.suppress(SandboxCrashed):
            await self.reset()
        remote, self.remote = self.remote, None
        if remote is not None:
            self.cloud.give_back(remote)


def _source(request: ExecRequest) -> str:
    """Return the code extended so that it reads the request's input and echoes its last expression."""
    code = request.code
    if request.echo:
        code = f"_tree = __import__('ast').parse({code!r})\nfor _one in _tree.body:\n    {_SHOW}"
    if request.stdin is None:
        return code
    text = request.stdin.decode("utf-8", errors="replace")
    return f"__import__('sys').stdin = __import__('io').StringIO({text!r})\n{code}"


class E2BSession(Session):
    """A session in one code context; see `Session`."""

    def __init__(self, owner: E2BSandbox) -> None:
        self.limits = owner.limits
        self._owner = owner
        self._context: Any = None
        self._why = ""

    @property
    def alive(self) -> bool:
        """True between the start of the context and its end."""
        return self._context is not None and not self._why

    @property
    def ended(self) -> bool:
        """True once the context has ended."""
        return bool(self._why)

    async def start(self) -> None:
        """Start the context."""
        if self._context is None and not self._why:
            box = await self._owner.here()
            self._context = await self._owner.guard(box.create_code_context(cwd=HOME))

    async def execute(self, request: ExecRequest) -> ExecResult:
        """Run Python code in the session's context, or a command in its directory."""
        if request.command is not None:
            return await self._owner.execute(request)
        for path, data in request.files.items():
            await self.write_file(path, data)
        await self.start()
        if self._why:
            note = f"the session has ended ({self._why}) and its state is lost; open a new one"
            return ExecResult(status="killed", stderr=note + "\n", note=note)
        result, useful = await self._owner.remote_code(self._context, _source(request), request)
        if not useful:
            await self._end(result.note)
            result = replace(result, note=f"{result.note}; the session has ended and its state is lost")
        return result

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file in the working directory."""
        return await self._owner.read_file(path)

    async def write_file(self, path: str, data: str | bytes) -> None:
        """Write a file into the working directory."""
        await self._owner.write_file(path, data)

    async def _end(self, why: str) -> None:
        context, self._context = self._context, None
        self._why = self._why or why
        if context is not None and self._owner.remote is not None:
            with contextlib.suppress(Exception):
                await asyncio.shield(self._owner.remote.box.remove_code_context(context))

    async def close(self) -> None:
        """Remove the context; may be called twice."""
        await self._end("closed")
