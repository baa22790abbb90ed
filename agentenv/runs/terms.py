"""What the mean of a run is a mean of, in short words that stand beside it wherever it is shown.

A mean says little without its tasks, its sampling, its user and its scorer: two runs that differ in one of
these are not two measurements of one thing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib import metadata
from typing import TYPE_CHECKING

from agentenv.core.episode_env import Task
from agentenv.core.fields import without_secrets
from agentenv.envs.spec import EnvSpec
from agentenv.envs.worlds import world_registry

if TYPE_CHECKING:
    from agentenv.core.limits import RunLimits
    from agentenv.engine.interface import Sampling
    from agentenv.envs.tasks import TaskSet
    from agentenv.runs.eval_config import EvalConfig

__all__ = ["terms_of", "training_terms"]


def terms_of(
    specs: Sequence[EnvSpec], tasks: Sequence[Sequence[Task]], config: EvalConfig
) -> tuple[str, ...]:
    """Return the terms of an evaluation: tasks, user and scorer, sampling, and the limits that were set.

    Args:
        specs: the environments.
        tasks: the tasks that are played of each.
        config: the configuration.
    """
    terms = dict.fromkeys(
        term
        for entry, chosen in zip(specs, tasks, strict=True)
        for term in (
            _tasks(_played(entry, config), len(chosen), config),
            *_scoring(entry.with_kwargs(config.env)),
        )
    )
    return tuple(filter(None, (*terms, _given(config.sampling, "temperature"), _given(config.limits))))


def training_terms(specs: Sequence[EnvSpec], temperature: float, limits: RunLimits) -> tuple[str, ...]:
    """Return the terms of the episodes that a training plays on its own tasks.

    Args:
        specs: the environments, with their arguments.
        temperature: the sampling temperature.
        limits: limits of each episode.
    """
    terms = dict.fromkeys(term for entry in specs for term in (_trained(entry.task_set()), *_scoring(entry)))
    return tuple(filter(None, (*terms, f"temperature {temperature}", _given(limits))))


def _trained(tasks: TaskSet) -> str:
    held_out = f"held out: {tasks.held_out}" if tasks.held_out else "none held out"
    number = "endless tasks" if tasks.num_tasks is None else f"{tasks.num_tasks:,} tasks"
    return f"{number} of the split {tasks.split_name}, {held_out}"


def _played(entry: EnvSpec, config: EvalConfig) -> TaskSet:
    tasks = entry.task_set()
    return tasks.split(config.split or tasks.held_out or tasks.split_name)


def _tasks(tasks: TaskSet, number: int, config: EvalConfig) -> str:
    most = tasks.num_tasks if tasks.is_read else None
    of = "" if most is None or most == number else f" of {most:,}"
    what = f"{number:,}{of} task{'s' * (number != 1 or bool(of))}"
    if tasks.left_out:
        what += f" ({len(tasks.left_out):,} left out that cannot be played)"
    if len(tasks.splits) == 1:
        return f"{what}, none held out"
    others = ", ".join(name for name in tasks.splits if name != tasks.split_name)
    unasked = not config.split and not tasks.held_out
    hint = f" (none is called held out; --split plays another: {others})" if unasked else ""
    return f"{what} of the split {tasks.split_name}{hint}"


def _scoring(entry: EnvSpec) -> Iterator[str]:
    """Yield who plays the user, what scores, and in which version."""
    user = entry.kwargs.get("user", _default_user(entry)) if entry.user is None else entry.user
    if isinstance(user, str):
        yield f"user={without_secrets({'user': user})['user']}"
    elif user is not None:
        yield f"user={getattr(user, '__name__', type(user).__name__)}"
    yield from (f"reward {reward.label} * {reward.weight:g}" for reward in entry.rewards)
    world, colon, _ = entry.id.partition(":")
    if colon and world in world_registry:
        for module in world_registry[world].modules[:1]:
            with suppress(metadata.PackageNotFoundError):
                yield f"{module} {metadata.version(module)}"


def _default_user(entry: EnvSpec) -> object:
    """Return the user whom an environment plays by default; None if it has none, or does not say so."""
    with suppress(ValueError, TypeError):  # a class in C has no signature
        declared = inspect.signature(entry.load()).parameters.get("user")
        if declared is not None and declared.default is not declared.empty:
            return declared.default
    return None


def _given(options: Sampling | RunLimits, always: str = "") -> str:
    """Return the options that were set, and one that is always told."""
    return ", ".join(
        f"{field.name} {value}"
        for field in fields(options)
        if (value := getattr(options, field.name)) != field.default or field.name == always
    )
