"""The episode that the current asyncio task plays, for engines that answer without a model.

A model sees an episode as tokens. A scripted policy, such as an environment's oracle, needs its messages and
its task instead, and `mock` the schemas of its tools. The runner sets `playing` once for each episode, in the
task of that episode, from which the engine is called too. Whoever renders a request sets `writing`, so that a
message of such an engine is written as the model's chat template writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random
from typing import TypeAlias, cast

from agentenv.core.errors import UsageError
from agentenv.core.messages import JsonValue, Message

__all__ = ["CurrentEpisode", "MessagePolicy", "oracle_of", "play_oracle", "playing", "writing"]

MessagePolicy: TypeAlias = Callable[
    [Sequence[Message], Mapping[str, object], Random],
    "Message | str | Awaitable[Message | str]",
]
"""A function `policy(messages, task, rng)` that returns the model's next message, or its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentEpisode:
    """What is known of the episode that is being played."""

    env: object
    """The environment."""
    env_id: str
    task: Mapping[str, object]
    seed: int
    """Seed of the episode, which all members of a group share."""
    messages: Sequence[Message]
    """Messages so far, which the runner goes on extending; a reader must not change them."""
    tools: Sequence[Mapping[str, JsonValue]] = ()
    """Schemas of the tools, in OpenAI's format."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that the environment takes as actions; empty if it takes any text."""
        space: object = getattr(self.env, "action_space", None)
        return tuple(getattr(space, "choices", None) or ())


def oracle_of(target: object) -> object:
    """Return the oracle of a class or of a function that makes an environment; None if there is none.

    It is the class's attribute `oracle`, or else the function `oracle` of the module.
    """
    oracle: object = getattr(target, "oracle", None)
    if oracle is None:
        oracle = getattr(sys.modules.get(getattr(target, "__module__", "")), "oracle", None)
    return oracle if callable(oracle) else None


playing: ContextVar[CurrentEpisode | None] = ContextVar("agentenv_playing", default=None)
"""The episode that the current task plays; None outside of episodes."""

writing: ContextVar[Callable[[Message], list[int]] | None] = ContextVar("agentenv_writing", default=None)
"""Returns the token ids of an answer to the present request, written by the template that rendered it; None
where no template did."""


def play_oracle(
    messages: Sequence[Message], task: Mapping[str, object], rng: Random
) -> Message | str | Awaitable[Message | str]:
    """Return the next message of the environment's oracle.

    Raises:
        UsageError: The environment has no oracle.
    """
    episode = playing.get()
    env = None if episode is None else episode.env
    oracle: object = getattr(env, "oracle_policy", None)
    if oracle is None:
        raise UsageError(
            f"{'the environment' if episode is None else episode.env_id} has no oracle",
            remedy="write a function oracle(messages, task, rng) beside the environment's class",
        )
    return cast("MessagePolicy", oracle)(messages, task, rng)
