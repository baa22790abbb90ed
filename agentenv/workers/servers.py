"""Assign the engine's servers to episodes, so that all workers together use them evenly."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["ServerShares", "num_servers_of"]


def num_servers_of(model: str) -> int:
    """Return how many servers an engine string names; 0 if it names none."""
    if not model.startswith(("http://", "https://")):
        return 0
    return sum(bool(part.strip()) for part in model.split(","))


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

    @contextmanager
    def lend(self) -> Generator[int | None]:
        """Lend a server for one episode, by its index; None if no choice is to be made."""
        if len(self.episodes) < 2:
            yield None
            return
        servers = range(len(self.episodes))
        server = min(servers, key=lambda server: (self.episodes[server], self._lent[server]))
        self.episodes[server] += 1
        self._lent[server] += 1
        try:
            yield server
        finally:
            self.episodes[server] -= 1
