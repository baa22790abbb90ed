"""Describe the state of a Gymnasium environment in words, and find the action that a text names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import gymnasium

from agentenv.core.errors import UsageError

__all__ = ["GymnasiumView", "view_of"]


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
    """An environment whose actions and observations are text already."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env.unwrapped

    @property
    def rules(self) -> str:
        """An empty text, because the environment explains itself."""
        return ""

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the observation unchanged."""
        return str(observation)

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
    from agentenv.envs.spaces import Text

    text = (gymnasium.spaces.Text, Text)
    if isinstance(env.action_space, text) and isinstance(env.observation_space, text):
        return TextView(env)
    name = env.spec.name if env.spec is not None else ""
    return games.get(name, GymnasiumView)(env)
