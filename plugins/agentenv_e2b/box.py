"""One sandbox of a client of the server, with its contexts and files."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack

from agentenv.core.serving import Refused
from agentenv.sandbox import Sandbox, Session

__all__ = ["HOME", "MAX_FILES", "MAX_FILE_BYTES", "Box"]

HOME = "/home/user/"
"""Home directory as E2B's SDK names it."""
MAX_FILE_BYTES = 64 << 20
"""Largest size of all files of a sandbox together, and of one request."""
MAX_FILES = 1000
"""Largest number of files of a sandbox."""
_MAX_CONTEXTS = 16


class Box:
    """One sandbox of a client; its sandbox is set once it is lent.

    Args:
        stack: ends with the box, and returns the sandbox to the pool.
    """

    sandbox: Sandbox

    def __init__(self, stack: AsyncExitStack) -> None:
        self.token = secrets.token_hex(16)
        """Token that the client sends with requests to this sandbox."""
        self.contexts: dict[str, Session] = {}
        self.files: dict[str, bytes] = {}
        self.last = "default"
        """Name of the context that was used last."""
        self.count = 0
        """Number of executions."""
        self._stack = stack
        self._timer: asyncio.TimerHandle | None = None

    def end_with(self, timer: asyncio.TimerHandle) -> None:
        """Replace the timer that ends this sandbox."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    async def context(self, name: str | None) -> Session:
        """Return the session of a context; it is created at its first use.

        Raises:
            Refused: The sandbox has too many contexts.
        """
        name = name or "default"
        session = self.contexts.get(name)
        if session is None and len(self.contexts) >= _MAX_CONTEXTS:
            raise Refused(429, f"the sandbox has {_MAX_CONTEXTS} contexts", remedy="remove one")
        self.last = name
        if session is None or session.ended:
            session = self.contexts[name] = self.sandbox.session()
            for path, data in self.files.items():
                await session.write_file(path, data)
        return session

    async def write(self, path: str, data: bytes) -> None:
        """Write a file into every context, also into those that are made later.

        Raises:
            Refused: The sandbox would have too many files or bytes.
        """
        files = {**self.files, path: data}
        if len(files) > MAX_FILES or sum(map(len, files.values())) > MAX_FILE_BYTES:
            raise Refused(413, f"a sandbox can have {MAX_FILES} files of {MAX_FILE_BYTES:,} bytes together")
        self.files = files
        for session in self.contexts.values():
            if session.alive:
                await session.write_file(path, data)

    async def forget_removed(self, session: Session) -> None:
        """Give later contexts no file that a command has removed, as the client empties a sandbox so."""
        for path in [*self.files] if session.alive else ():
            try:
                await session.read_file(path)
            except FileNotFoundError:
                del self.files[path]

    async def close(self) -> None:
        """End the contexts and return the sandbox."""
        if self._timer is not None:
            self._timer.cancel()
        await self._stack.aclose()
