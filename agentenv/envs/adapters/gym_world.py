"""The world `gymnasium:ID`."""

from __future__ import annotations

from agentenv.envs.spec import EnvSpec
from agentenv.envs.worlds import World, held_out_seeds, train_seeds

__all__ = ["GYMNASIUM"]


def _spec_of(id: str) -> EnvSpec:
    from agentenv.envs.adapters.gym import GymnasiumText, known

    known(id)
    return EnvSpec.of(
        f"gymnasium/{id.replace('/', '.')}",
        GymnasiumText,
        kwargs={"env": id},
        tasks={"train": train_seeds, "test": held_out_seeds},
        description=f"{id} of Gymnasium, played in text",
    )


GYMNASIUM = World(_spec_of, "ID", description="text and small discrete environments of Gymnasium")
