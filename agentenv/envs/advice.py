"""What the author of an environment most likely forgot: told once for a class, wherever it is played.

Evaluations, trainings and `agentenv check` take their words from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from itertools import islice
from weakref import WeakKeyDictionary

from agentenv.core.episode_env import Task
from agentenv.core.visible import logger

__all__ = ["of_one_reward", "tell_if_alike", "tell_once", "unmarked_methods"]

_log = logger(__name__)
LOOKED_AT = 32
"""Tasks of which at least two differ, unless the author forgot something."""
SOME_EPISODES = 8
"""Number of episodes from which one reward for all of them is suspicious."""
_told: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()


def tell_once(owner: type, advice: str, *values: object) -> None:
    """Log an advice, unless this class was given it before.

    Args:
        owner: the class.
        advice: the text, with a `%s` for each value.
        values: what to put into it.
    """
    told = _told.setdefault(owner, set())
    if advice not in told:
        told.add(advice)
        _log.warning(advice, *values)


def of_one_reward(rewards: Collection[float], number: int, marks: Collection[float] = ()) -> str:
    """Return what to say where episodes that may differ in how good they are have one reward; else nothing.

    Args:
        rewards: the different rewards.
        number: number of episodes.
        marks: rewards that all may have, because everything is solved.
    """
    if number < SOME_EPISODES or len(rewards) != 1 or set(rewards) & set(marks):
        return ""
    (reward,) = rewards
    return f"all {number} episodes have the reward {reward:g}: does reward() tell answers apart?"


def unmarked_methods(cls: type, base: type) -> list[str]:
    """Return the public methods that a class adds itself to a base class, which may be meant as tools."""
    return [
        name
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and not name.startswith("_") and not hasattr(base, name)
    ]


def tell_if_alike(env_id: str, tasks: Iterable[Task]) -> None:
    """Log that the tasks of a run have the same fields; those without fields differ by their seeds.

    An id that the data has is a field too: worlds look their tasks up by it.
    """
    first, *others = [task.data for task in islice(tasks, LOOKED_AT)] or [{}]
    if first and others and all(fields == first for fields in others):
        text = "the tasks of %s are alike: start() gets the same fields in each of the first %d"
        _log.warning(text, env_id, len(others) + 1)
