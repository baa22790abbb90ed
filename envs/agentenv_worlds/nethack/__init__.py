"""NetHack of the NetHack Learning Environment: `nethack:NetHackScore-v0`."""

from __future__ import annotations

from agentenv.envs import EnvSpec, World, WorldFacts, held_out_seeds, train_seeds
from agentenv_worlds.names import check_known

__all__ = ["WORLD", "spec_of"]


def spec_of(id: str) -> EnvSpec:
    """Return the specification of a name after the colon, which is an id of Gymnasium."""
    WORLD.check_installed(f"nethack:{id}")
    from agentenv_worlds.nethack.env import IDS, MAX_STEPS, NetHack

    check_known("NLE has no task that can be played here and is named", id, IDS)
    return EnvSpec.of(
        f"nethack/{id}",
        NetHack,
        kwargs={"env": id},
        tasks={"train": train_seeds, "test": held_out_seeds},
        max_turns=MAX_STEPS,
        description=f"{id} of the NetHack Learning Environment, on its screen of text",
    )


WORLD = World(
    spec_of,
    "ID",
    ("nle",),
    "pip install --no-deps nle",
    "NetHack: NetHackScore-v0, NetHackStaircase-v0, NetHackEat-v0 and four more",
    facts=WorldFacts(
        licence="NetHack General Public License",
        tasks="seeds",
        oracle="none",
        episode="0.2 ms a step",
        broken="NetHackChallenge-v0 forbids seeds",
    ),
)
