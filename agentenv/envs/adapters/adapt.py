"""Choose the adapter for an environment object of another library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentenv.core.errors import UsageError

if TYPE_CHECKING:
    from agentenv.envs.env import Env

__all__ = ["adapt"]


def adapt(made: Any, *, where: str) -> Env:
    """Wrap an environment object of another library, so that it is an `Env`.

    Raises:
        UsageError: No adapter fits the object.
    """
    import gymnasium

    if isinstance(made, gymnasium.Env):
        from agentenv.envs.adapters.gym import GymnasiumText

        return GymnasiumText(made)
    if callable(getattr(made, "reset", None)) and (
        hasattr(type(made), "get_reward") or not hasattr(made, "step")
    ):
        from agentenv.envs.adapters.trl import ToolMethods

        return ToolMethods(made)
    if callable(getattr(made, "reset", None)) and callable(getattr(made, "step", None)):
        from agentenv.envs.adapters.stepped import SteppedObject

        return SteppedObject(made)
    raise UsageError(
        f"{where} made {made!r:.200}, which is not an environment",
        remedy="subclass ae.Env or ae.ToolEnv, or return a Gymnasium environment or an object with reset() "
        "and step(), or with reset() and tool methods",
    )
