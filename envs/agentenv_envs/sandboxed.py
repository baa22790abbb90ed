"""The base class of environments that run model-written code: it provides their sandbox."""

from __future__ import annotations

from typing import Any

from agentenv.core import SandboxProtocol
from agentenv.envs import ToolEnv
from agentenv.sandbox import Sandbox, create
from agentenv_tools.python import close_session

__all__ = ["SandboxedEnv"]


class SandboxedEnv(ToolEnv):
    """An environment that always has a sandbox: the runner's, or else one that it makes itself.

    Args:
        sandbox: Backend of the sandbox that it makes; "auto" raises an error on machines without isolation.
    """

    def __init__(self, sandbox: str = "auto") -> None:
        self._backend = sandbox
        self._own: Sandbox | None = None

    async def sandbox(self) -> SandboxProtocol:
        """Return the episode's sandbox; tools find it in the context afterwards.

        Raises:
            SandboxUnavailable: This machine has no isolation.
        """
        if self.context.sandbox is None:
            if self._own is None:
                self._own = create(self._backend, size=1)
            await self._own.start()
            await self._own.reset()
            self.context.sandbox = self._own
        return self.context.sandbox

    async def close(self) -> None:
        """End the episode's session, and the sandbox if the environment made it."""
        await close_session(self.context)
        own, self._own = self._own, None
        if own is not None:
            await own.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave a sandbox that this environment made out of its copies."""
        return {**super().__getstate__(), "_own": None}
