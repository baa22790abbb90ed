"""Reward functions of TRL, which score a batch: they take lists and return a list.

Such a function has a parameter `environments`, `prompts` or `completions`. It is called for one episode at a
time, with lists of one entry, and the only entry of the list that it returns is the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentenv.core.errors import UsageError
from agentenv.core.fields import wanted_by

__all__ = ["lists_of", "only_value", "takes_lists"]

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
