"""Environments and tools of others, played as ours without being rewritten.

| module | what it adapts |
|---|---|
| `gym` | Gymnasium environments with text, or with few actions and a readable state |
| `reasoning` | tasks of reasoning-gym |
| `arena` | games of textarena for one player |
| `mcp` | tools of an MCP server |
| `openenv` | environments of OpenEnv, from a server or as objects |
| `trl` | classes with `reset` and tool methods: TRL's `environment_factory` shape |
| `verifiers` | multi-turn environments of verifiers 0.1 to 0.3 |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentenv.errors import UsageError

if TYPE_CHECKING:
    from agentenv.env import Env

__all__ = ["adapt"]


def adapt(made: Any, *, where: str) -> Env:
    """Return an object that someone else's class made as one of our environments.

    Raises:
        UsageError: It is of no shape that is known.
    """
    import gymnasium

    if isinstance(made, gymnasium.Env):
        from agentenv.adapters.gym import GymnasiumText

        return GymnasiumText(made)
    if callable(getattr(made, "reset", None)) and not hasattr(made, "step"):
        from agentenv.adapters.trl import ToolMethods

        return ToolMethods(made)
    raise UsageError(
        f"{where} made {made!r:.200}, which is no environment: subclass ae.Env or ae.ToolEnv, or give "
        "a Gymnasium environment, or an object with reset() and tool methods"
    )
