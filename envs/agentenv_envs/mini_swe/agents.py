"""`RepairAgent`, the same tasks for agents that have a loop and tools of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentenv.core import SandboxProtocol, SandboxUnavailable
from agentenv.envs import AgentEnv
from agentenv.sandbox import clean_path
from agentenv_envs.mini_swe.repair import Repair
from agentenv_tools.python import answer_of

__all__ = ["RepairAgent"]

_MAX_FILES = 1000
_MAX_FILE_BYTES = 1_000_000


class RepairAgent(AgentEnv):
    """The tasks of `agentenv/MiniSWE-v0` for an agent with its own loop; register it with `sandbox="auto"`.

    A subclass writes `agent(self, url, task)` or `command(self)`. `self.issue` is the report of the mistake,
    and the library's files are in `self.workspace`. The files are scored as they are when the agent ends.
    """

    issue: str = ""
    """What is wrong with the library, as a user reports it."""

    async def start(self, task: Mapping[str, Any]) -> None:
        """Write the library's files with the mistake into the workspace."""
        self._repair = Repair.of(task)
        self.issue = await self._repair.report(self._sandbox)
        for path, text in self._repair.files().items():
            self._write(path, text.encode())

    async def shell(self, command: str) -> str:
        """Run a shell command on the workspace's files in the sandbox, and return what it prints.

        Files that it creates or changes are written into the workspace; files that it removes stay there.
        """
        result = await self._sandbox.exec(command, files=self._files())
        for path, content in (result.files or {}).items():
            self._write(path, content)
        return answer_of(result)

    async def reward(self) -> float:
        """Return 1 if the hidden tests show what they show with the published library, otherwise 0."""
        files = {path: content.decode(errors="replace") for path, content in self._files().items()}
        return await self._repair.score(self._sandbox, files)

    @property
    def _sandbox(self) -> SandboxProtocol:
        if self.context.sandbox is None:
            raise SandboxUnavailable(
                f"{type(self).__name__} runs its hidden tests in a sandbox, but the episode has none",
                remedy='register it with sandbox="auto"',
            )
        return self.context.sandbox

    def _files(self) -> dict[str, bytes]:
        """Return the workspace's Python files; links and very large files are left out."""
        files: dict[str, bytes] = {}
        for file in sorted(self.workspace.rglob("*.py"))[:_MAX_FILES]:
            inside = file.resolve().is_relative_to(self.workspace.resolve())
            if inside and file.is_file() and not file.is_symlink() and file.stat().st_size <= _MAX_FILE_BYTES:
                files[file.relative_to(self.workspace).as_posix()] = file.read_bytes()
        return files

    def _write(self, path: str, content: bytes) -> None:
        file: Path = self.workspace / clean_path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
