"""The world `gymnasium:ID`."""

from __future__ import annotations

from agentenv.core import UnknownEnvironment
from agentenv.envs import EnvSpec, World, held_out_seeds, train_seeds, world_registry

__all__ = ["GYMNASIUM"]


_WORLDS = {"BabyAI-": "minigrid", "MiniGrid-": "minigrid", "NetHack": "nethack"}
"""Ids that a world of their own tells in words, by their beginnings."""


def _spec_of(id: str) -> EnvSpec:
    for beginning, world in _WORLDS.items():
        if id.startswith(beginning):
            return world_registry[world].spec(id)
    import gymnasium  # slow to import, and lists import this file

    from agentenv_envs.games import GymnasiumGame

    try:
        gymnasium.spec(id)
    except gymnasium.error.Error as error:
        raise UnknownEnvironment(f"gymnasium:{id}: {error}") from error
    return EnvSpec.of(
        f"gymnasium/{id.replace('/', '.')}",
        GymnasiumGame,
        kwargs={"env": id},
        tasks={"train": train_seeds, "test": held_out_seeds},
        description=f"{id} of Gymnasium, played in text",
    )


GYMNASIUM = World(_spec_of, "ID", description="text and small discrete environments of Gymnasium")
