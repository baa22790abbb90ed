"""Reward functions: their arguments, their return values, and how their parts are added up.

1. Arguments are filled by name: `answer`, `messages`, `task`, `stop_reason`, `env`, `state`, `context`,
   `seed`, `sandbox`, `trajectory`, and the task's fields. These names are reserved: a task field with one of
   them can only be read from `task`.
2. A reward is a finite number, or None if the episode cannot be scored, which is not a reward of 0. A
   mapping contains named parts. If one part has no score, the whole reward is None.
3. A reward function of TRL, with `environments`, `prompts` or `completions`, is called with lists of one
   entry, and returns a list of one reward.
4. If a reward raises an exception, the episode fails with stop reason `error`; it is never scored 0.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeAlias, cast

from agentenv.core.episode_env import Outcome
from agentenv.core.errors import UsageError
from agentenv.core.fields import arguments_for, wanted_by
from agentenv.core.threads import off_loop
from agentenv.envs.gym_values import outcome_of, total_of

__all__ = [
    "RESERVED_NAMES",
    "Reward",
    "RewardFunction",
    "RewardLike",
    "as_reward",
    "call_reward",
    "combine",
    "takes_lists",
]

RewardFunction: TypeAlias = Callable[..., object]
"""Function that returns a number, None, a mapping of parts, or an awaitable of one of these."""

RESERVED_NAMES = frozenset(
    {
        "answer",
        "context",
        "env",
        "messages",
        "sandbox",
        "seed",
        "state",
        "stop_reason",
        "task",
        "trajectory",
    }
)
"""Parameter names that are filled in addition to the task's fields."""


@dataclass(frozen=True, slots=True)
class Reward:
    """One part of an environment's reward.

    Raises:
        UsageError: The weight is not finite, or the time limit is not positive.
    """

    function: RewardFunction
    weight: float = 1.0
    """Factor of the part in the reward; with 0 the part is recorded but does not count."""
    name: str = ""
    """Name of the part; empty means the function's name."""
    timeout_s: float | None = None
    """Time limit, after which `TimeoutError` is raised; the runner's own limit also applies."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UsageError(f"a reward must be a function, not {self.function!r}")
        if not isfinite(self.weight):
            raise UsageError(f"the weight of reward {self.label!r} must be finite, not {self.weight}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"timeout_s of reward {self.label!r} must be positive, not {self.timeout_s}")

    @property
    def label(self) -> str:
        """Name of the reward's part."""
        return self.name or getattr(self.function, "__name__", type(self.function).__name__)

    async def score(self, offered: Mapping[str, object], task: Mapping[str, object]) -> Outcome:
        """Call the function and return its outcome, without the weight.

        Raises:
            UsageError: The function has a parameter that cannot be filled, or its value is not a reward.
            TimeoutError: The function took longer than `timeout_s`.
        """
        where = f"reward {self.label!r}"
        async with asyncio.timeout(self.timeout_s):
            value = await call_reward(self.function, offered, task, where=where)
        return outcome_of(value, where=where)


RewardLike: TypeAlias = "Reward | RewardFunction | tuple[RewardFunction, float]"
"""A `Reward`, a plain function, or a pair of a function and its weight."""


def as_reward(value: RewardLike) -> Reward:
    """Turn a function, or a pair of a function and a weight, into a `Reward`.

    Raises:
        UsageError: The value is none of these.
    """
    if isinstance(value, Reward):
        return value
    if isinstance(value, tuple):
        function, weight = value
        return Reward(function, weight)
    return Reward(value)


async def call_by_name(
    function: Callable[..., object], offered: Mapping[str, object], rest: Mapping[str, object]
) -> object:
    """Call a function with its arguments filled by name; a synchronous function runs in a thread."""
    arguments = arguments_for(function, offered, rest)
    if inspect.iscoroutinefunction(function):
        return await cast("Awaitable[object]", function(**arguments))
    value = await off_loop(function, **arguments)
    return await cast("Awaitable[object]", value) if inspect.isawaitable(value) else value


async def call_reward(
    function: RewardFunction, offered: Mapping[str, object], task: Mapping[str, object], *, where: str
) -> object:
    """Call a reward function of one episode, or one of TRL's, which takes and returns lists."""
    if not takes_lists(function):
        return await call_by_name(function, offered, task)
    messages = cast("Sequence[Any]", offered["messages"])
    values = await call_by_name(function, {}, lists_of(task, offered.get("env"), messages))
    return only_value(values, where=where)


def combine(own: Outcome, parts: Sequence[tuple[Reward, Outcome]]) -> Outcome:
    """Add weighted parts to an environment's own outcome; if one part has no score, the sum is None."""
    totals: list[float | None] = [own.reward]
    named: dict[str, float | None] = dict(own.rewards)
    for reward, outcome in parts:
        totals.append(None if outcome.reward is None else reward.weight * outcome.reward)
        named[_free_name(reward.label, named)] = outcome.reward
        for name, part in outcome.rewards.items():
            named[_free_name(f"{reward.label}/{name}", named)] = part
    return Outcome(total_of(totals), named)


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"


_LISTS = frozenset({"environments", "prompts", "completions"})


def takes_lists(function: Callable[..., object]) -> bool:
    """Return whether a reward function scores a batch, as TRL's do."""
    return bool(_LISTS & wanted_by(function).names)


def lists_of(fields: Mapping[str, object], environment: object, messages: Sequence[Any]) -> dict[str, object]:
    """Return what TRL passes to a reward function, for a batch of one episode.

    Args:
        fields: the fields of the task, which are the columns of TRL's dataset.
        environment: the object that was played; of an adapter, the object that it plays.
        messages: the conversation. What the model said first and all that follows is the completion.
    """
    roles = [message["role"] for message in messages]
    start = roles.index("assistant") if "assistant" in roles else len(roles)
    return {
        **{name: [value] for name, value in fields.items() if name != "prompt"},
        "environments": [getattr(environment, "inner", environment)],
        "prompts": [list(messages[:start])],
        "completions": [list(messages[start:])],
    }


def only_value(values: object, *, where: str) -> object:
    """Return the only entry of the list that a reward function returned.

    Raises:
        UsageError: The value is not a list with one entry.
    """
    if isinstance(values, (str, Mapping)) or not isinstance(values, Sequence) or len(values) != 1:
        raise UsageError(
            f"{where} returned {values!r:.200} for lists of one episode",
            remedy="return a list with one number for each episode",
        )
    return values[0]
