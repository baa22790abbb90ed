"""Environments of verifiers: `verifiers:NAME`."""

from __future__ import annotations

from functools import partial

from agentenv.core import UsageError
from agentenv.envs import EnvSpec, World, WorldFacts

__all__ = ["WORLD", "spec_of"]


def spec_of(name: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    from agentenv_worlds.verifiers.env import Verifiers, rows, splits
    from agentenv_worlds.verifiers.task_set import TaskSetEnv, is_task_set, task_rows

    if not name:
        raise UsageError("verifiers: names no environment", remedy="write it as in verifiers:wordle")
    first = is_task_set(name)
    return EnvSpec.of(
        f"verifiers/{name.replace('/', '.')}-v0",
        TaskSetEnv if first else Verifiers,
        kwargs={"source": name},
        tasks=partial(task_rows, name) if first else {one: partial(rows, name, one) for one in splits(name)},
        description=f"{name} of verifiers",
    )


WORLD = World(
    spec_of,
    "NAME",
    ("verifiers",),
    "pip install 'verifiers>=0.1.14,<0.4' into an environment of its own",
    "environments of verifiers",
    facts=WorldFacts(
        licence="MIT",
        tasks="those of the environment",
        oracle="none",
        episode="that of the environment",
    ),
)
