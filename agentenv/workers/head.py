"""Watch the head of a cluster, without which a run cannot go on.

Ray's core ends a driver 60 seconds after the head has gone, without a word of ours: nothing is saved then,
and the run is said to be running. So the driver lets Ray wait for longer, is first, and ends the run itself.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable
from typing import Any, Self, TypeVar

from agentenv.core.threads import off_loop
from agentenv.core.visible import logger
from agentenv.workers.worker import ClusterLost

__all__ = ["Head", "let_ray_wait"]

_T = TypeVar("_T")
_log = logger(__name__)

ASK_EVERY_S = 2.0
"""Time between two connections to the head, and the time limit of each."""
GONE_S = 30.0
"""Time without an answer after which the head has gone; a head that is restarted is there again by then."""
RAY_WAITS_S = "3600"
"""Time for which Ray waits for the head: a training may take long until it is at the end of its step."""


def let_ray_wait() -> None:
    """Let Ray, which is started next, not end this process while the run ends by itself."""
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", RAY_WAITS_S)


class Head:
    """Watches the head of a cluster while its context is open, which may be opened again.

    Args:
        address: HOST:PORT of the head.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._gone = False
        self._awaited: set[asyncio.Future[Any]] = set()
        self._lost = ClusterLost(
            f"the head of the Ray cluster at {address} has not answered for {GONE_S:.0f} s",
            remedy="start the cluster again, or name another one with --ray",
        )

    async def __aenter__(self) -> Self:
        self._gone = False
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        await asyncio.wait({self._watching})

    async def answer(self, called: Awaitable[_T]) -> _T:
        """Return the result of a call of an actor.

        Raises:
            ClusterLost: The head has gone, so the actor will end, too.
            Exception: What the call raised.
        """
        if self._gone:
            raise self._lost
        answer = asyncio.ensure_future(called)
        self._awaited.add(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._gone:
                raise self._lost from None
            raise
        finally:
            self._awaited.discard(answer)

    async def _watch(self) -> None:
        """Wait until the head has gone, and end all that is awaited then."""
        clock = asyncio.get_running_loop().time
        silent = 0.0
        while silent < GONE_S:
            await asyncio.sleep(ASK_EVERY_S)
            began = clock()
            # In a thread, because a step of a training may hold the loop up for longer than the time limit.
            if await off_loop(self._answers):
                silent = 0.0
                continue
            if not silent:
                told = (
                    "the head of the Ray cluster at %s does not answer; the run ends in %.0f s if it stays so"
                )
                _log.warning(told, self._address, GONE_S)
            silent += ASK_EVERY_S + min(clock() - began, ASK_EVERY_S)
        self._gone = True
        for answer in self._awaited:
            answer.cancel()

    def _answers(self) -> bool:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), ASK_EVERY_S).close()
        except OSError:  # a TimeoutError is one
            return False
        return True
