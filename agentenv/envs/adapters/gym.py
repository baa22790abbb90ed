"""Gymnasium environments played in text, for example `gymnasium:FrozenLake-v1`.

In each turn the model gets the state in words and names an action; the last action that its message names
is played. If a message names no action, nothing changes and the model is told so. Rewards are those of the
environment's steps. Tasks are seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import gymnasium

from agentenv.core.errors import UnknownEnvironment
from agentenv.envs.adapters.views import GymnasiumView, view_of
from agentenv.envs.env import Env
from agentenv.envs.spaces import Text

__all__ = ["GymnasiumText"]


class GymnasiumText(Env):
    """A Gymnasium environment whose state is described in words and whose actions have names.

    Args:
        env: the environment, or its id in Gymnasium.
        arguments: arguments of `gymnasium.make`.

    Raises:
        UnknownEnvironment: Gymnasium does not know the id.
        UsageError: The environment's actions cannot be named in text.
    """

    observation_space = Text()
    action_space = Text()
    games: ClassVar[Mapping[str, type[GymnasiumView]]] = MappingProxyType({})
    """Views that describe certain environments in words, by their names in Gymnasium."""
    view_type: ClassVar[type[GymnasiumView] | None] = None
    """View of every environment of this class; None chooses one."""

    def __init__(self, env: gymnasium.Env[Any, Any] | str, **arguments: Any) -> None:
        self.inner = _made(env, arguments) if isinstance(env, str) else env
        view_type = self.view_type
        self.view: GymnasiumView = view_type(self.inner) if view_type else view_of(self.inner, self.games)
        self.action_space = Text(choices=tuple(self.view.names))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Start an episode; the task's field `seed` is the environment's seed."""
        task_seed = self.task.get("seed", seed)
        # Gymnasium's generators take any whole number from 0, but its spaces refuse very large ones.
        inner_seed = None if task_seed is None else int(str(task_seed)) % 2**31
        observation, info = self.inner.reset(seed=inner_seed)
        self.view.begin(self.inner)
        return f"{self.view.rules}\n\n{self.view.describe(observation, info)}".lstrip("\n"), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the action that the text names."""
        chosen = self.view.read(action)
        if chosen is None:
            return self.view.unread(), 0.0, False, False, {"unread_action": True}
        observation, reward, terminated, truncated, info = self.inner.step(chosen)
        told = self.view.tell(observation, info, bool(terminated))
        return told, float(reward), bool(terminated), bool(truncated), {}

    def close(self) -> None:
        """Close the Gymnasium environment."""
        self.inner.close()


def _made(id: str, arguments: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    # Gymnasium's passive checker would warn about environments that the user did not write.
    try:
        return gymnasium.make(id, disable_env_checker=True, **arguments)
    except gymnasium.error.Error as error:
        raise UnknownEnvironment(f"gymnasium:{id} cannot be made: {error}") from error
