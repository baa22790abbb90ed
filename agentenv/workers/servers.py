"""The engine's servers as all workers together use and see them; the driver assigns one to each episode."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from random import SystemRandom
from typing import Any

from agentenv.engine.interface import features_of
from agentenv.engine.listed import addresses, is_listed, names_servers

__all__ = ["ServerShares", "num_servers_of", "server_metrics", "servers_text", "together"]


def num_servers_of(model: str) -> int:
    """Return how many servers an engine string names; 0 if it names none, or a list that may change."""
    return len(addresses(model)) if names_servers(model) and not is_listed(model) else 0


_random = SystemRandom()


class ServerShares:
    """Lends the server with the fewest episodes.

    Args:
        num_servers: number of servers.
    """

    # A dead server is lent all the same: the workers notice its death, and use another one for the episode.

    def __init__(self, num_servers: int) -> None:
        self.episodes = [0] * num_servers
        """Number of running episodes of each server."""
        self._lent = [0] * num_servers
        """How often each server was lent, so that episodes one after another go round."""
        # Several drivers may use the same servers, and must not all begin with the first one.
        self._ties = [_random.random() for _ in range(num_servers)]

    @contextmanager
    def lend(self) -> Generator[int | None]:
        """Lend a server for one episode, by its index; None if no choice is to be made."""
        if len(self.episodes) < 2:
            yield None
            return
        keys = list(zip(self.episodes, self._lent, self._ties, strict=True))
        server = keys.index(min(keys))
        self.episodes[server] += 1
        self._lent[server] += 1
        try:
            yield server
        finally:
            self.episodes[server] -= 1


def together(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each server from the rows of all processes that use it.

    Args:
        rows: what `agentenv.engine.Features.servers` returns in each process.
    """
    servers: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        servers.setdefault(row["server"], []).append(row)
    return [_of_one(name, of_it) for name, of_it in servers.items()]


def _of_one(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sums = {key: sum(row[key] for row in rows) for key in ("sessions", "in_flight", "failures", "used")}
    versions = [row["version"] for row in rows if row["version"] is not None]
    problem = next((row["problem"] for row in rows if row["problem"]), "")
    return {
        "server": name,
        "time": time.time(),
        **sums,
        "processes": len(rows),
        "version": min(versions, default=None),
        "problem": problem,
    }


def servers_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in a few words how many servers are used, and how often they failed; empty if one does well."""
    failures = sum(row["failures"] for row in rows)
    if len(rows) < 2 and not failures:
        return ""
    used = sum(row["used"] > 0 for row in rows)
    failed = f", {failures} failures" if failures else ""
    return f"{used}/{len(rows)} servers{failed}"


def server_metrics(engine: object) -> dict[str, float]:
    """Return how many servers a trainer's engine uses, and how often they were taken out of use so far."""
    rows = features_of(engine).servers()
    if not rows:
        return {}
    failures = float(sum(row["failures"] for row in rows))
    return {"servers/used": float(sum(row["used"] for row in rows)), "servers/failures": failures}
