"""Small web pages of MiniWoB++: `miniwob:PAGE`."""

from __future__ import annotations

from agentenv.core import install_line
from agentenv.envs import EnvSpec, World, WorldFacts, held_out_seeds, train_seeds

__all__ = ["WORLD", "spec_of"]


def spec_of(page: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    from agentenv_worlds.miniwob.browser import check_page
    from agentenv_worlds.miniwob.env import MAX_TURNS, MiniWob
    from agentenv_worlds.miniwob.oracle import SOLVED, SolvedMiniWob

    check_page(page)
    return EnvSpec.of(
        f"miniwob/{page}-v0",
        SolvedMiniWob if page in SOLVED else MiniWob,
        kwargs={"page": page},
        tasks={"train": train_seeds, "test": held_out_seeds},
        max_turns=MAX_TURNS,
        description=f"the web page {page} of MiniWoB++",
    )


WORLD = World(
    spec_of,
    "PAGE",
    ("miniwob", "playwright"),
    install_line("miniwob", more="miniwob"),
    "small web pages of MiniWoB++, by accessibility tree and by screenshots",
    facts=WorldFacts(
        licence="MIT",
        tasks="seeds",
        oracle="10 of 130 pages",
        episode="a reset 80 to 230 ms, a step 45 to 200 ms",
        broken="pages whose task is to drag cannot be solved",
    ),
)
