"""Reward functions: their arguments, their return values, and how their parts are added up.

1. Arguments are filled by name: `answer`, `messages`, `task`, `stop_reason`, `env`, `state`, `context`,
   `seed`, `sandbox`, `trajectory`, and the task's fields. These names are reserved: a task field with one of
   them can only be read from `task`.
2. A reward is a finite number, or None if the episode cannot be scored, which is not a reward of 0. A
   mapping contains named parts. If one part has no score, the whole reward is None.
3. A reward function of TRL, with a parameter such as `completions`, is called with lists of one entry, and
   returns a list of one reward (`agentenv.envs.rewards.batched`). If this is None, the function does not
   count, as in TRL's sum; an episode that no function scores has no reward.
4. If a reward raises an exception, the episode fails with stop reason `error`; it is never scored 0.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TypeAlias, cast

from agentenv.core.episode_env import Outcome
from agentenv.core.errors import UsageError
from agentenv.core.fields import arguments_for
from agentenv.core.threads import off_loop
from agentenv.envs.gym_values import outcome_of, total_of
from agentenv.envs.rewards.batched import Batch, takes_lists

__all__ = [
    "RESERVED_NAMES",
    "Reward",
    "RewardFunction",
    "RewardLike",
    "as_reward",
    "combine",
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

    @property
    def batched(self) -> bool:
        """True if the function scores a batch, as TRL's do."""
        return takes_lists(self.function)

    async def score(self, offered: Mapping[str, object], task: Mapping[str, object]) -> Outcome:
        """Call the function and return its outcome, without the weight.

        Raises:
            UsageError: The function has a parameter that cannot be filled, or its value is not a reward.
            TimeoutError: The function took longer than `timeout_s`.
        """
        where = f"reward {self.label!r}"
        async with asyncio.timeout(self.timeout_s):
            if not self.batched:
                return outcome_of(await call_by_name(self.function, offered, task), where=where)
            batch = Batch(task, offered)
            values = await call_by_name(self.function, {}, batch.arguments())
        return replace(outcome_of(batch.only(values, where=where), where=where), rewards=batch.logged)


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


def combine(own: Outcome | None, parts: Sequence[tuple[Reward, Outcome]]) -> Outcome:
    """Add weighted parts to an environment's own outcome; if one that counts has no score, the sum is None.

    Args:
        own: outcome of the environment; None if it has no reward of its own.
        parts: rewards with their outcomes. A batched one without a score does not count.
    """
    counted = [
        (reward, part.reward) for reward, part in parts if part.reward is not None or not reward.batched
    ]
    totals = [None if value is None else reward.weight * value for reward, value in counted]
    named: dict[str, float | None] = {}
    if own is not None:
        totals.insert(0, own.reward)
        named.update(own.rewards)
    for reward, outcome in parts:
        named[_free_name(reward.label, named)] = outcome.reward
        for name, part in outcome.rewards.items():
            named[_free_name(f"{reward.label}/{name}", named)] = part
    return Outcome(total_of(totals) if totals or not parts else None, named)


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"
