"""Assistants under attack, of AgentDojo: `agentdojo:SUITE`."""

from __future__ import annotations

from functools import partial

from agentenv.core import install_line
from agentenv.envs import EnvSpec, World, WorldFacts

__all__ = ["WORLD", "spec_of"]


def spec_of(suite: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    from agentenv_worlds.agentdojo.env import CONVERSATIONS, MAX_MESSAGES, AgentDojo, attacked_rows, rows
    from agentenv_worlds.agentdojo.package import check_suite

    check_suite(suite)
    return EnvSpec.of(
        f"agentdojo/{suite}-v0",
        AgentDojo,
        kwargs={"suite": suite},
        tasks={"test": partial(rows, suite), "attacked": partial(attacked_rows, suite)},
        max_turns=CONVERSATIONS * MAX_MESSAGES,
        description=f"{suite} of AgentDojo, with and without an attacker",
    )


WORLD = World(
    spec_of,
    "SUITE",
    ("agentdojo", "deepdiff", "email_validator", "yaml"),
    install_line("agentdojo", more="agentdojo"),
    "assistants under attack: workspace, travel, banking, slack",
    facts=WorldFacts(
        licence="MIT",
        tasks="97 in test, 949 in attacked",
        oracle="every task",
        episode="60 ms",
    ),
)
