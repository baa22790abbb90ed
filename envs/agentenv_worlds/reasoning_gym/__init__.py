"""Questions of reasoning-gym with their verifiers: `reasoning_gym:NAME`."""

from __future__ import annotations

from functools import partial

from agentenv.core import install_line
from agentenv.envs import EnvSpec, World, WorldFacts
from agentenv_worlds.names import check_known

__all__ = ["WORLD", "spec_of"]


def spec_of(name: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    from agentenv.envs.rewards import Reward
    from agentenv_worlds.reasoning_gym.env import datasets, kind_of, rows, verifier_raised

    check_known("reasoning-gym has no data set", name, datasets())
    return EnvSpec.of(
        f"reasoning_gym/{name}-v0",
        kind_of(name),
        rewards=[Reward(verifier_raised, weight=0)],
        tasks={"train": partial(rows, name, "train"), "test": partial(rows, name, "test")},
        description=f"{name} of reasoning-gym",
    )


WORLD = World(
    spec_of,
    "NAME",
    ("reasoning_gym",),
    install_line("envs"),
    "questions of reasoning-gym, with their verifiers",
    facts=WorldFacts(
        licence="Apache-2.0",
        tasks="1,600 in train, 400 in test of each set",
        oracle="all sets but five",
        episode="2 ms",
        broken="five sets lack references, one cannot be made, three pay for junk; docs/check.md names them",
    ),
)
