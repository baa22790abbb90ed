"""Grid worlds with a mission, of MiniGrid and BabyAI: `minigrid:BabyAI-GoToLocal-v0`."""

from __future__ import annotations

from functools import partial

from agentenv.envs import EnvSpec, World, WorldFacts
from agentenv_worlds.names import check_known

__all__ = ["WORLD", "spec_of"]


def spec_of(id: str) -> EnvSpec:
    """Return the specification of a name after the colon, which is an id of Gymnasium."""
    WORLD.check_installed(f"minigrid:{id}")
    from agentenv_worlds.minigrid.env import kind_of, known, max_steps, tasks

    check_known("MiniGrid has no environment", id, known())
    return EnvSpec.of(
        f"minigrid/{id}",
        kind_of(id),
        kwargs={"env": id},
        tasks={"train": partial(tasks, id, 0), "test": partial(tasks, id, 1)},
        max_turns=max_steps(id),
        description=f"{id} of MiniGrid, told in words",
    )


WORLD = World(
    spec_of,
    "ID",
    ("minigrid",),
    "pip install minigrid",
    "grid worlds with a mission: BabyAI-GoToLocal-v0, MiniGrid-DoorKey-5x5-v0 and about 190 more",
    facts=WorldFacts(
        licence="Apache-2.0",
        tasks="seeds",
        oracle="BabyAI's bot, on 90 of 96 BabyAI levels; none on MiniGrid's",
        episode="2 ms a step",
        broken="no oracle: *Carrying, KeyInBox, OpenDoorsOrder*Debug",
    ),
)
