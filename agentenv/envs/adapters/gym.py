"""Gymnasium environments played in text, for example `gymnasium:FrozenLake-v1`.

In each turn the model gets the state in words and names an action; the last action that its message names
is played. If a message names no action, nothing changes and the model is told so. Rewards are those of the
environment's steps. Tasks are seeds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar

import gymnasium

from agentenv.core.errors import UnknownEnvironment, UsageError
from agentenv.envs.adapters.stepped import shown
from agentenv.envs.env import Env
from agentenv.envs.spaces import Text

__all__ = ["GymnasiumText", "GymnasiumView"]

_MAX_NUMBERS = 1_000
"""Numbers of an observation that are shown in text."""


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


class GymnasiumView:
    """Describes an environment with a few discrete actions. This base class shows numbers.

    Raises:
        UsageError: The environment's actions are not discrete.
    """

    title = "You play a game."
    names: Mapping[str, Any] = MappingProxyType({})
    """Actions by their names, in lower case."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env.unwrapped
        if not self.names:
            space = env.action_space
            if not isinstance(space, gymnasium.spaces.Discrete):
                raise UsageError(
                    f"{env.spec.id if env.spec else env} has the action space {space}; "
                    "only text and a small number of discrete actions can be played in text"
                )
            first = int(space.start)
            self.names = {str(first + number): first + number for number in range(int(space.n))}
        words = "|".join(sorted(map(re.escape, self.names), key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE)

    @property
    def rules(self) -> str:
        """Text that explains the game and lists its actions."""
        return f"{self.title} Answer with one of: {', '.join(self.names)}."

    def begin(self, env: gymnasium.Env[Any, Any]) -> None:
        """Take note of the environment after a reset."""
        self.env = env.unwrapped

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the state in words."""
        return f"State: {observation}"

    def tell(self, observation: Any, info: Mapping[str, Any], terminated: bool) -> str:
        """Return the result of a step in words."""
        return self.describe(observation, info)

    def read(self, text: str) -> Any | None:
        """Return the last action that a text names; None if it names none."""
        named = self._pattern.findall(text)
        return self.names[named[-1].lower()] if named else None

    def unread(self) -> str:
        """Return the answer to a message that names no action."""
        return f"No action understood. Answer with one of: {', '.join(self.names)}."


class TextView(GymnasiumView):
    """An environment whose actions are text already, and whose observations can be written as text."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env.unwrapped

    @property
    def rules(self) -> str:
        """An empty text, because the environment explains itself."""
        return ""

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the observation: text unchanged, anything else as JSON."""
        return shown(observation)

    def read(self, text: str) -> str:
        """Return the text unchanged."""
        return text


def view_of(
    env: gymnasium.Env[Any, Any], games: Mapping[str, type[GymnasiumView]] = MappingProxyType({})
) -> GymnasiumView:
    """Return the view that describes an environment.

    Args:
        env: the environment.
        games: views of certain environments, by their names in Gymnasium.

    Raises:
        UsageError: The environment cannot be played in text.
    """
    bare = env.unwrapped
    for space in ("action_space", "observation_space"):
        if getattr(bare, space, None) is None:
            raise UsageError(
                f"{type(bare).__name__} has no {space}, which a gymnasium.Env must have",
                remedy=f"set it in the class, such as {space} = gymnasium.spaces.Text(1000)",
            )
    seen = env.observation_space
    if isinstance(env.action_space, (gymnasium.spaces.Text, Text)):
        if isinstance(seen, gymnasium.spaces.Box) and prod(seen.shape) > _MAX_NUMBERS:
            raise UsageError(f"{type(bare).__name__} has the observation space {seen}, too large for text")
        return TextView(env)
    name = env.spec.name if env.spec is not None else ""
    return games.get(name, GymnasiumView)(env)
