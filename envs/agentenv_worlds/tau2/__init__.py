"""Customer service of tau2: `tau2:DOMAIN`."""

from __future__ import annotations

from functools import partial

from agentenv.envs import EnvSpec, World, WorldFacts

__all__ = ["WORLD", "spec_of"]


def spec_of(domain: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    from agentenv_worlds.tau2.env import MAX_TURNS, Tau2, check_domain, rows, splits

    check_domain(domain)
    return EnvSpec.of(
        f"tau2/{domain}-v0",
        Tau2,
        kwargs={"domain": domain},
        tasks={split: partial(rows, domain, split) for split in splits(domain)},
        max_turns=MAX_TURNS,
        description=f"customer service of tau2, {domain}",
    )


WORLD = World(
    spec_of,
    "DOMAIN",
    ("inspect_evals",),
    "pip install --no-deps inspect-evals",
    "customer service: retail, airline, telecom, banking_knowledge",
    facts=WorldFacts(
        licence="MIT",
        tasks="retail 74 and 40, airline 30 and 20, telecom 74 and 40, banking_knowledge 97",
        oracle="every task",
        episode="telecom 7 ms, retail 0.3 s",
        broken="banking_knowledge is scored as before tau2 1.0.1",
    ),
)
