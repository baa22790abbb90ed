"""The Berkeley Function-Calling Leaderboard: `bfcl:CATEGORY`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from agentenv.envs import EnvSpec, World, WorldFacts

__all__ = ["WORLD", "spec_of"]


def spec_of(category: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    from agentenv_worlds.bfcl.data import MULTI_TURN, check_category, rows
    from agentenv_worlds.bfcl.env import MAX_TURNS, BfclMultiTurn, BfclSingleTurn

    check_category(category)
    entry = EnvSpec.of(
        f"bfcl/{category}-v0",
        BfclMultiTurn if category in MULTI_TURN else BfclSingleTurn,
        tasks={"test": partial(rows, category)},
        max_turns=MAX_TURNS,
        description=f"{category} of the Berkeley Function-Calling Leaderboard",
    )
    if category in MULTI_TURN or entry.limits is None:
        return entry
    # The only message is never written again, also if its calls cannot be read.
    return replace(entry, limits=replace(entry.limits, max_parse_errors=0))


WORLD = World(
    spec_of,
    "CATEGORY",
    ("bfcl_eval", "mpmath"),
    "pip install mpmath && pip install --no-deps bfcl-eval",
    "the Berkeley Function-Calling Leaderboard, multi-turn and single-turn",
    facts=WorldFacts(
        licence="Apache-2.0",
        tasks="4,241 in test, in 17 categories",
        oracle="4,235 tasks",
        episode="1 ms; multi-turn 12 ms",
        broken="six tasks refuse the leaderboard's own answer; docs/worlds/bfcl.md names them",
    ),
)
