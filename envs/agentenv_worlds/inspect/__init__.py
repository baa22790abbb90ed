"""Tasks of Inspect: `inspect:MODULE@task` or `inspect:FILE.py@task`."""

from __future__ import annotations

from functools import partial

from agentenv.core import UsageError
from agentenv.envs import EnvSpec, World, WorldFacts

__all__ = ["WORLD", "spec_of"]


def spec_of(name: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    from agentenv_worlds.inspect.env import Inspect, rows, task_of

    if not name:
        raise UsageError("inspect: names no task", remedy="write it as in inspect:inspect_evals.gsm8k@gsm8k")
    task_of(name)  # so that nobody learns from failed episodes what cannot be played
    return EnvSpec.of(
        f"inspect/{name.replace('/', '.').replace('@', '.').strip('.')}-v0",
        Inspect,
        kwargs={"source": name},
        tasks={"test": partial(rows, name)},
        description=f"{name} of Inspect",
    )


WORLD = World(
    spec_of,
    "MODULE@TASK",
    ("inspect_ai",),
    "pip install inspect-ai",
    "tasks of Inspect with their own solvers, tools and scorers",
    facts=WorldFacts(licence="MIT", tasks="those of the task", oracle="none", episode="that of the task"),
)
