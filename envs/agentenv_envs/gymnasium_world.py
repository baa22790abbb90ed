"""The world `gymnasium:ID`."""

from __future__ import annotations

from agentenv.core import UnknownEnvironment
from agentenv.envs import EnvSpec, World, held_out_seeds, train_seeds

__all__ = ["GYMNASIUM"]


def _spec_of(id: str) -> EnvSpec:
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
