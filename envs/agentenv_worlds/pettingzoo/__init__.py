"""Games of PettingZoo for two players, told in text: `pettingzoo:GAME`."""

from __future__ import annotations

from functools import partial

from agentenv.core import install_line
from agentenv.envs import EnvSpec, World, WorldFacts
from agentenv_worlds.turns import held_out_seats, train_seats

__all__ = ["WORLD", "spec_of"]


def spec_of(game: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    from agentenv_worlds.pettingzoo.env import PettingZoo, seats_of

    seats = seats_of(game)
    name, _, version = game.rpartition("_v")
    return EnvSpec.of(
        f"pettingzoo/{name}-v{version}",
        PettingZoo,
        kwargs={"game": game},
        tasks={"train": partial(train_seats, seats), "test": partial(held_out_seats, seats)},
        description=f"{name} of PettingZoo, told in text",
    )


WORLD = World(
    spec_of,
    "GAME",
    ("pettingzoo", "pygame", "rlcard"),
    install_line("pettingzoo"),
    "tic-tac-toe, connect four, Leduc and Texas hold'em, rock-paper-scissors, for two players",
    facts=WorldFacts(
        licence="MIT",
        tasks="seeds",
        oracle="none",
        episode="2 ms",
    ),
)
