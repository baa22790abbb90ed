"""Decide how many episodes run at once."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.core.limits import RunLimits, least
from agentenv.engine.base import ChatEngine, Engine, HasCache

__all__ = ["DEFAULT_AT_ONCE", "AtOnce", "episodes_at_once"]

DEFAULT_AT_ONCE = 32
"""Number of episodes at once if neither the run nor the engine says anything."""


@dataclass(frozen=True, slots=True)
class AtOnce:
    """How many episodes run at once."""

    number: int
    reason: str = ""
    """Why there are so many, as a sentence; empty if the run named the number, and for the default."""


def episodes_at_once(
    asked: int | None, engine: Engine | ChatEngine, limits: RunLimits, *, processes: int = 1
) -> AtOnce:
    """Return how many episodes this process plays at once.

    Unless the run names a number, as many run as fit into the cache of the engine's servers, where the engine
    knows its size: with fewer the servers idle, and with more they compute the same tokens again.

    Args:
        asked: the number that the run names, if it names one.
        engine: the engine that samples.
        limits: limits of the episodes, which say how long one can become.
        processes: number of processes that share the engine's servers.
    """
    if asked is not None:
        return AtOnce(asked)
    context = least(limits.max_context_tokens, engine.max_context_tokens)
    fit = engine.episodes_at_once(context) if context and isinstance(engine, HasCache) else None
    if context is None or fit is None:
        return AtOnce(DEFAULT_AT_ONCE)
    number = max(1, fit // processes)
    # Few episodes fill the whole context of a model, so only a limit of the run makes the default smaller.
    if limits.max_context_tokens is None and number <= DEFAULT_AT_ONCE:
        return AtOnce(DEFAULT_AT_ONCE)
    where = f", shared by {processes} processes" if processes > 1 else ""
    return AtOnce(
        number,
        f"{number} episodes at once: the servers serve {fit} of at most {context} tokens{where}; "
        "set runner.concurrency for another number",
    )
