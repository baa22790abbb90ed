"""Experiments of ScienceWorld: `scienceworld:TASK`."""

from __future__ import annotations

from functools import partial

from agentenv.core import install_line
from agentenv.envs import EnvSpec, World, WorldFacts

__all__ = ["WORLD", "spec_of"]


def spec_of(task: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    from agentenv_worlds.scienceworld.env import MAX_TURNS, SPLITS, ScienceWorld, rows
    from agentenv_worlds.scienceworld.simulator import read_name

    read_name(task)
    return EnvSpec.of(
        f"scienceworld/{task.replace('+', '.')}-v0",
        ScienceWorld,
        kwargs={"task": task},
        tasks={split: partial(rows, task, split) for split in SPLITS},
        max_turns=MAX_TURNS,
        description=f"experiments of ScienceWorld, {task}",
    )


WORLD = World(
    spec_of,
    "TASK",
    ("scienceworld", "py4j"),
    install_line("scienceworld"),
    "experiments of ScienceWorld in a world of text, such as boil and find-animal",
    facts=WorldFacts(
        licence="Apache-2.0",
        tasks="10 to 1,386 variations of each of 30 experiments",
        oracle="every experiment",
        episode="a reset 0.1 to 1 s, a step 10 ms",
    ),
)
