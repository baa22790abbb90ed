"""Compare the weights of several servers by their checksums, after they have read new ones.

A server that reads a stale or half-written file has other weights than the others, and samples on. Servers
whose checksums were equal before an update must therefore be equal after it. Servers that were different from
the start, because they run on other hardware or split the model in another way, are not compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import sha256

from pydantic_core import to_json

from agentenv.core.errors import EngineError, EngineUnavailable
from agentenv.core.visible import logger
from agentenv.engine.vllm.client import Server
from agentenv.engine.vllm.pool import ServerPool

__all__ = ["Checksums"]

_log = logger(__name__)


class Checksums:
    """Compares the full weights of the servers of a pool.

    Args:
        pool: the servers.
        available: whether the servers compute checksums.
        sent: whether the weights are sent to the servers, which must then be equal in any case.
    """

    def __init__(self, pool: ServerPool, *, available: bool, sent: bool = False) -> None:
        self._pool = pool
        self._comparable: bool | None = sent or (None if available else False)
        """Whether equal weights have equal checksums on all servers; None while that is not known."""

    async def begin(self, servers: Sequence[Server]) -> None:
        """Find out, before the first update of several servers, whether they can be compared."""
        if self._comparable is not None or len(servers) < 2:
            return
        sums = await self._sums_of(servers)
        if len(sums) < 2:
            return
        self._comparable = len(set(sums.values())) == 1
        if not self._comparable:
            _log.info("the servers' weights have different checksums, so they are not compared after updates")

    async def of(self, server: Server) -> str | None:
        """Return the checksum of a server's weights; None if it cannot be compared."""
        return await self._sum_of(server) if self._comparable else None

    async def require(self, server: Server, checksum: str | None, path: str | None) -> None:
        """Check that a server has the weights of this checksum, if one is known.

        Raises:
            EngineError: It has others.
        """
        if self._comparable and checksum is not None and await self._sum_of(server) != checksum:
            raise self.different(server, "those that the other servers have", path)

    async def _sums_of(self, servers: Sequence[Server]) -> dict[Server, str]:
        """Return the checksums of the servers that can be reached; the pool takes the others out of use."""
        sums = await asyncio.gather(*map(self._sum_of, servers), return_exceptions=True)
        known: dict[Server, str] = {}
        for server, its in zip(servers, sums, strict=True):
            if isinstance(its, str):
                known[server] = its
            elif not isinstance(its, EngineUnavailable):
                raise its
        return known

    async def _sum_of(self, server: Server) -> str:
        limit = self._pool.request_timeout_s
        answer = await self._pool.command(server, "/weight_checker", {"action": "checksum"}, limit_s=limit)
        return sha256(to_json(sorted(answer.get("checksums", {}).items()))).hexdigest()

    @staticmethod
    def different(server: Server, others: str, path: str | None) -> EngineError:
        """Return the error for a server that has other weights than it should."""
        return EngineError(
            f"the weights that {server.url} got from {path} are not {others}: their checksums differ",
            remedy="check that all servers are started alike and see the same files",
        )
