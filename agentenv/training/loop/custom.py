"""Rollout functions: code of yours that plays the groups of a training step instead of the runner."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

from agentenv.core.episode_env import Task
from agentenv.core.errors import UsageError
from agentenv.core.fields import arguments_for
from agentenv.core.imports import import_object, name_of
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.engine.interface import Engine, Sampling
from agentenv.envs.spec import EnvSpec
from agentenv.render.renderer import Renderer
from agentenv.runner.runner import Runner

__all__ = ["Play", "RolloutFunction", "RolloutRequest", "named_rollout", "play_with"]

RolloutFunction: TypeAlias = Callable[..., Iterable[TrajectoryGroup] | Awaitable[Iterable[TrajectoryGroup]]]
"""Plays groups of episodes; it names those fields of `RolloutRequest` that it needs as its parameters."""


class Play(Protocol):
    """Plays the groups of a request as the training itself would."""

    async def __call__(self, group_size: int | None = None) -> list[TrajectoryGroup]:
        """Play a group for each task, with the request's group size or another one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """What a rollout function may ask for: the groups to play, and the means to play them."""

    engine: Engine
    """The engine, which has the weights of the training."""
    renderer: Renderer
    """The renderer of the model."""
    tasks: tuple[Task, ...]
    """The tasks to play, all of one environment."""
    group_ids: tuple[str, ...]
    """An id for the group of each task, which no other group of the run has."""
    group_size: int
    """Number of episodes of each task."""
    spec: EnvSpec
    """The environment."""
    sampling: Sampling
    """The sampling settings of the training."""
    runner: Runner
    """A runner with the limits and options of the run."""
    play: Play
    """Plays groups as the training itself would, with its seeds and group ids."""


def named_rollout(rollout: RolloutFunction | str) -> tuple[RolloutFunction, str]:
    """Return a rollout function and its name for the record.

    Args:
        rollout: the function, or its name such as `file.py:function`.

    Raises:
        UsageError: The function cannot be imported or called, or has a parameter that no request has.
    """
    function: Any = import_object(rollout, where="rollout") if isinstance(rollout, str) else rollout
    if not callable(function):
        raise UsageError(f"rollout {rollout!r:.200} is no function", remedy="name a function of the tasks")
    own = cast("RolloutFunction", function)
    arguments_for(own, dict.fromkeys(_names()), {})
    if isinstance(rollout, str):
        return own, rollout
    return own, name_of(rollout) or getattr(rollout, "__qualname__", type(rollout).__qualname__)


async def play_with(
    function: RolloutFunction, request: RolloutRequest, weights_version: int
) -> list[TrajectoryGroup]:
    """Return the groups that a rollout function plays.

    Sampled tokens without a version get that of the weights at the beginning of the call. A function that is
    not asynchronous runs in a thread of its own, so that the engine and other episodes go on.

    Args:
        function: the rollout function.
        request: the groups to play.
        weights_version: version of the weights that the engine has now.

    Raises:
        UsageError: The function returned something else than groups.
    """
    offered = {name: getattr(request, name) for name in _names()}
    call = partial(function, **arguments_for(function, offered, {}))
    returned: Any = call() if inspect.iscoroutinefunction(function) else await asyncio.to_thread(call)
    groups: Any = await returned if inspect.isawaitable(returned) else returned
    if isinstance(groups, Iterable):
        played = list(cast("Iterable[Any]", groups))
        if all(isinstance(group, TrajectoryGroup) for group in played):
            return [_dated(group, weights_version) for group in played]
        groups = next(group for group in played if not isinstance(group, TrajectoryGroup))
    raise UsageError(
        f"the rollout function returned {groups!r:.200}, a {type(groups).__name__} and not a group",
        remedy="return a list of TrajectoryGroup, such as `await play()` does",
    )


def _names() -> list[str]:
    return [field.name for field in fields(RolloutRequest)]


def _dated(group: TrajectoryGroup, version: int) -> TrajectoryGroup:
    """Return the group with a weights version at each span of sampled tokens."""
    members = tuple(_dated_episode(member, version) for member in group)
    return group if members == group.trajectories else TrajectoryGroup(members)


def _dated_episode(episode: Trajectory, version: int) -> Trajectory:
    spans = [span for sequence in episode.sequences for span in sequence.spans]
    if all(span.weights_version is not None for span in spans if span.source == "model"):
        return episode
    sequences = tuple(
        replace(
            sequence,
            spans=tuple(
                replace(span, weights_version=version)
                if span.source == "model" and span.weights_version is None
                else span
                for span in sequence.spans
            ),
        )
        for sequence in episode.sequences
    )
    return replace(episode, sequences=sequences)
