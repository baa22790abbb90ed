"""Crafter, survival in an open world: `crafter:CrafterReward-v1`."""

from __future__ import annotations

from agentenv.envs import EnvSpec, World, WorldFacts, held_out_seeds, train_seeds
from agentenv_worlds.names import check_known

__all__ = ["WORLD", "spec_of"]


def spec_of(id: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    WORLD.check_installed(f"crafter:{id}")
    from agentenv_worlds.crafter.env import ID, LENGTH, Crafter

    check_known("Crafter has no environment that is played here and named", id, [ID])
    return EnvSpec.of(
        f"crafter/{ID}",
        Crafter,
        tasks={"train": train_seeds, "test": held_out_seeds},
        max_turns=LENGTH,
        description="Crafter, survival in an open world, told in words",
    )


WORLD = World(
    spec_of,
    "ID",
    ("crafter",),
    "pip install crafter",
    "survival in an open world with 22 achievements: CrafterReward-v1",
    facts=WorldFacts(
        licence="MIT",
        tasks="seeds",
        oracle="none",
        episode="3 ms a step",
    ),
)
