"""Reward functions: what they may return, what they may ask for, and how their parts add up.

1. Arguments are filled by name: `answer`, `messages`, `task`, `stop_reason`, `env`, `state`,
   `context`, `seed`, `sandbox`, `trajectory`, and the task's fields. The reserved names win; a
   task field of the same name is read from `task`.
2. A reward is a finite number, or None: "cannot be scored", which is not 0. A mapping gives named
   parts. One part without a score leaves the whole without one.
3. A reward that raises is an error of the episode, never a 0.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeAlias, cast

from agentenv.core.by_name import arguments_for
from agentenv.core.episode_env import Outcome
from agentenv.core.errors import UsageError
from agentenv.core.threads import off_loop

__all__ = ["RESERVED_NAMES", "Reward", "RewardFunction", "RewardLike", "as_reward", "combine", "outcome_of"]

RewardFunction: TypeAlias = Callable[..., object]
"""Returns a number, None, a mapping of parts, or an awaitable of one of these."""

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
"""What a reward may ask for besides the task's fields."""


@dataclass(frozen=True, slots=True)
class Reward:
    """One part of an environment's reward.

    Raises:
        UsageError: The weight is not finite, or the time limit not positive.
    """

    function: RewardFunction
    weight: float = 1.0
    """0 records the part without counting it."""
    name: str = ""
    """Name of the part; the function's own when empty."""
    timeout_s: float | None = None
    """After this the reward raises `TimeoutError`; the runner's own limit holds too."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UsageError(f"a reward is a function, not {self.function!r}")
        if not isfinite(self.weight):
            raise UsageError(f"the weight of reward {self.label!r} is {self.weight}, not a finite number")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"timeout_s of reward {self.label!r} must be positive, not {self.timeout_s}")

    @property
    def label(self) -> str:
        """The part's name."""
        return self.name or getattr(self.function, "__name__", type(self.function).__name__)

    async def score(self, offered: Mapping[str, object], task: Mapping[str, object]) -> Outcome:
        """Call the function and return what it said, before weighting.

        Raises:
            UsageError: The function asks for something that is not on offer.
            TimeoutError: It took longer than `timeout_s`.
        """
        async with asyncio.timeout(self.timeout_s):
            value = await call_by_name(self.function, offered, task)
        return outcome_of(value, where=f"reward {self.label!r}")


RewardLike: TypeAlias = "Reward | RewardFunction | tuple[RewardFunction, float]"
"""A reward, a plain function, or a function with its weight."""


def as_reward(value: RewardLike) -> Reward:
    """Turn a function, or a function with a weight, into a reward.

    Raises:
        UsageError: It is none of these.
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
    """Call a function with the arguments it names; a synchronous one runs off the event loop."""
    arguments = arguments_for(function, offered, rest)
    if inspect.iscoroutinefunction(function):
        return await cast("Awaitable[object]", function(**arguments))
    value = await off_loop(function, **arguments)
    return await cast("Awaitable[object]", value) if inspect.isawaitable(value) else value


def outcome_of(value: object, *, where: str) -> Outcome:
    """Read what a `finish` or a reward function returned.

    Raises:
        UsageError: It is not a number, None or a mapping of those, or not finite.
    """
    if isinstance(value, Outcome):
        return value
    if isinstance(value, Mapping):
        parts = {str(name): _number(part, f"{where}, part {name!r}") for name, part in value.items()}
        return Outcome(_total(list(parts.values())), parts)
    return Outcome(_number(value, where))


def combine(own: Outcome, parts: Sequence[tuple[Reward, Outcome]]) -> Outcome:
    """Add weighted parts to an environment's own outcome; a part without score leaves none."""
    totals: list[float | None] = [own.reward]
    named: dict[str, float | None] = dict(own.rewards)
    for reward, outcome in parts:
        totals.append(None if outcome.reward is None else reward.weight * outcome.reward)
        named[_free_name(reward.label, named)] = outcome.reward
        for name, part in outcome.rewards.items():
            named[_free_name(f"{reward.label}/{name}", named)] = part
    return Outcome(_total(totals), named)


def _total(parts: Sequence[float | None]) -> float | None:
    if any(part is None for part in parts):
        return None
    return sum(cast("Sequence[float]", parts), 0.0)


def _number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)):
        raise UsageError(f"{where} gave {value!r}", remedy="a reward is a number or None")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where} gave {value!r}", remedy="a reward is a number or None") from error
    if not isfinite(number):
        raise UsageError(f"{where} gave {number}", remedy="a reward must be finite, or None if there is none")
    return number


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"
