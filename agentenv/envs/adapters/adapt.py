"""An object that someone else's class made, as one of our environments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentenv.core.errors import UsageError

if TYPE_CHECKING:
    from agentenv.envs.env import Env

__all__ = ["adapt"]


def adapt(made: Any, *, where: str) -> Env:
    """Return an object that someone else's class made as one of our environments.

    Raises:
        UsageError: It is of no shape that is known.
    """
    import gymnasium

    if isinstance(made, gymnasium.Env):
        from agentenv.envs.adapters.gym import GymnasiumText

        return GymnasiumText(made)
    if callable(getattr(made, "reset", None)) and not hasattr(made, "step"):
        from agentenv.envs.adapters.trl import ToolMethods

        return ToolMethods(made)
    raise UsageError(
        f"{where} made {made!r:.200}, which is no environment: subclass ae.Env or ae.ToolEnv, or give "
        "a Gymnasium environment, or an object with reset() and tool methods"
    )
