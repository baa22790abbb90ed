"""Games of textarena, for one player and more: `textarena:GAME`."""

from __future__ import annotations

from functools import partial

from agentenv.envs import EnvSpec, World, WorldFacts, held_out_seeds, train_seeds
from agentenv_worlds.names import check_known
from agentenv_worlds.turns import held_out_seats, train_seats

__all__ = ["WORLD", "spec_of"]


def spec_of(game: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    from agentenv_worlds.textarena.env import TextArena, games, players_of
    from agentenv_worlds.textarena.seats import TextArenaSeats, seat_names

    check_known("textarena has no game", game, games())
    players = players_of(game)
    if players == 1:
        tasks: dict[str, object] = {"train": train_seeds, "test": held_out_seeds}
        kwargs: dict[str, object] = {"game": game}
    else:
        seats = seat_names(players)
        tasks = {"train": partial(train_seats, seats), "test": partial(held_out_seats, seats)}
        kwargs = {"game": game, "players": players}
    return EnvSpec.of(
        f"textarena/{game}" if "-v" in game else f"textarena/{game}-v0",
        TextArena if players == 1 else TextArenaSeats,
        kwargs=kwargs,
        tasks=tasks,
        description=f"{game} of textarena" + (f", for {players} players" if players > 1 else ""),
    )


WORLD = World(
    spec_of,
    "GAME",
    ("textarena",),
    "pip install textarena",
    "games of textarena, for one player and more",
    facts=WorldFacts(
        licence="MIT",
        tasks="seeds",
        oracle="none",
        episode="1 ms for FrozenLake",
        broken="three games need an API key, five fail on Python 3.11; docs/worlds/games.md names them",
    ),
)
