"""Text adventures of TextWorld: `textworld:GAME`."""

from __future__ import annotations

from functools import partial

from agentenv.core import install_line
from agentenv.envs import EnvSpec, World, WorldFacts

__all__ = ["WORLD", "spec_of"]


def spec_of(game: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    from agentenv_worlds.textworld.env import MAX_TURNS, TextWorld, held_out_tasks, train_tasks
    from agentenv_worlds.textworld.games import settings_of

    settings_of(game)
    return EnvSpec.of(
        f"textworld/{game.replace('+', '.')}-v0",
        TextWorld,
        kwargs={"game": game},
        tasks={"train": partial(train_tasks, game), "test": partial(held_out_tasks, game)},
        max_turns=MAX_TURNS,
        description=f"text adventures of TextWorld, {game}",
    )


WORLD = World(
    spec_of,
    "GAME",
    ("textworld", "jericho", "tatsu"),
    install_line("textworld", more="jericho textworld"),
    "text adventures of TextWorld: simple, coin_collector, treasure_hunter, cooking",
    facts=WorldFacts(
        licence="MIT",
        tasks="seeds",
        oracle="every game",
        episode="1 to 3 s to make a game, then a reset 20 ms, a step 1 to 4 ms",
    ),
)
