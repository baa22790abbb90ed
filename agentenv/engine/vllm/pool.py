"""A pool of servers of one model, which routes requests, retries them and watches the servers.

1. An episode stays with one server, where its prefix is cached, as long as that server is used. A driver of
   several processes may assign the server; otherwise it is the one with the fewest episodes of this process.
2. Connection errors, hung requests and the statuses 429 and 503 are retried, for at most `retry_s` seconds
   after the first failure. This is safe, because each request contains its seed.
3. Every server is checked again and again, also before its first request. One that cannot be reached, does
   not answer for `hang_s` seconds, or fails the check of its weights is taken out of use, and is used again
   when it passes the check.
4. Every request has a time limit, from what the last ones took, and ends at once when its server hangs or
   has the wrong weights.
5. Cancelling a request closes its connection, upon which vLLM frees the request.
6. A list of the servers is read again and again. A server that joins is checked before its first request, and
   one that leaves gets no new request and is forgotten after its last.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from random import SystemRandom
from time import monotonic
from typing import Any, TypeVar

from pydantic_core import to_json

from agentenv.core.errors import EngineError, EngineUnavailable, UsageError
from agentenv.core.threads import off_loop
from agentenv.core.visible import logger
from agentenv.engine.vllm.assigned import assigned_server
from agentenv.engine.vllm.client import (
    MAX_BYTES,
    ModelMissing,
    Server,
    ServerClient,
    Silent,
    Unreachable,
    WeightsTaken,
)
from agentenv.engine.vllm.events import JoinedStream, TokenTeller

__all__ = ["Server", "ServerPool"]

T = TypeVar("T")
_log = logger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
CHECK_EVERY_S = 5.0
"""Seconds between two checks of a server that is used."""
CHECK_LIMIT_S = 10.0
"""Longest that one check waits for an answer."""
SLOWER = 3.0
"""How many times as long as the slowest completion a request may take for each token that it may have."""
FEW = 8
"""Completions after which that is known well: after one, requests may take `1 + FEW` times as long."""
SHORTEST_LIMIT_S = 30.0
"""Shortest such limit; what a pause for new weights delays longer is asked again."""
LIST_EVERY_S = 10.0
"""Seconds between two readings of a list of servers."""
RESTART_S = 5.0
"""Less than the time that any vLLM server needs to start, so a check holds for at least this long."""


class ServerPool:
    """Posts JSON to the server to which an episode belongs.

    Args:
        urls: servers of the same model.
        concurrency: most requests in flight to each server; further requests wait.
        retry_s: seconds for which a request is retried after its first failure.
        request_timeout_s: time limit of each request.
        hang_s: seconds without any answer after which a server is taken out of use.
        api_key: key that is sent as a bearer token.
        confirm: whether each completion must be preceded or followed by a check of its server, because the
            completions themselves do not name the weights.
        socket: path of the socket file on which the server listens; empty for the network.
        listed: reads the addresses of the servers, which may have changed; None if they never change.
        watch_all: whether all servers are checked from the start, and not only those that were needed once.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        concurrency: int = 256,
        retry_s: float = 120.0,
        request_timeout_s: float = 1800.0,
        hang_s: float = 120.0,
        api_key: str | None = None,
        confirm: bool = False,
        socket: str = "",
        listed: Callable[[], Sequence[str]] | None = None,
        watch_all: bool = True,
    ) -> None:
        # Invariant: replaced and never changed, so that those who wait in the middle of it see one state.
        self.servers = [Server(url) for url in urls]
        self._listed, self._watch_all = listed, watch_all
        self._reading: asyncio.Task[None] | None = None
        self.retry_s = retry_s
        self.request_timeout_s = request_timeout_s
        self.hang_s = hang_s
        self._check_limit_s = min(CHECK_LIMIT_S, hang_s)
        self._concurrency = concurrency
        self._ties = SystemRandom()
        self._client = ServerClient(api_key, socket=socket)
        self.check: Callable[[Server], Awaitable[None]] = self.reach
        """Raises EngineError if a server must not be used; without another function it only has to answer."""
        self.left: Callable[[Server], Awaitable[None]] | None = None
        """Is told of each server that left the list, after its last request."""
        self._confirm = confirm
        self._sticky: dict[str, Server] = {}
        self.updating = asyncio.Lock()
        """Held while weights change, so that one update ends before the next begins."""
        self._changed = asyncio.Condition()
        self._took: deque[float] = deque(maxlen=512)
        """Seconds that each of the last requests took for one token."""
        self._waiting = 0
        """Number of requests that wait for a server with free capacity."""

    async def post(
        self,
        path: str,
        data: bytes,
        read: Callable[[dict[str, Any], float], T],
        *,
        session_id: str | None = None,
        teller: TokenTeller | None = None,
        max_tokens: int = 0,
        max_bytes: int = MAX_BYTES,
    ) -> T:
        """Post to the server of the episode, and return what `read` makes of the answer.

        Args:
            path: path of the request.
            data: JSON of the request.
            read: function of the answer and of the seconds that the request waited. If it raises
                EngineUnavailable, the server is taken out of use and the request is retried.
            session_id: id of the episode.
            teller: is told the tokens of an answer that is streamed.
            max_tokens: most tokens that the answer may have; 0 if that says nothing about its time.
            max_bytes: most bytes that the answer may have.

        Raises:
            ContextTooLong: The server says that the prompt does not fit.
            EngineUnavailable: No server answered within `retry_s` after the first failure.
            EngineError: The server refused the request, or its answer is not a JSON object.
        """
        self._open()
        began = monotonic()
        failing: float | None = None
        pause = FIRST_PAUSE_S
        while True:
            server = await self._take(session_id, failing)
            waited = monotonic() - began
            try:
                return await self._ask(
                    server,
                    path,
                    data,
                    lambda answer, waited=waited: read(answer, waited),
                    session_id,
                    teller=teller,
                    max_tokens=max_tokens,
                    max_bytes=max_bytes,
                )
            except EngineUnavailable as error:
                now = monotonic()
                failing = now if failing is None else failing
                if now - failing + pause > self.retry_s:
                    raise EngineUnavailable(
                        f"{error}; gave up after {now - began:.0f} s (retry_s={self.retry_s:g})"
                    ) from None
            finally:
                await self._give_back(server)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _ask(
        self,
        server: Server,
        path: str,
        data: bytes,
        read: Callable[[dict[str, Any]], T],
        session_id: str | None,
        *,
        teller: TokenTeller | None,
        max_tokens: int,
        max_bytes: int,
    ) -> T:
        """Post to one server, once; what its failure says about the server decides whether it is used on."""
        sent = monotonic()
        try:
            answer = await self._client.post(
                server,
                path,
                data,
                limit_s=self._limit_s(server, max_tokens),
                session_id=session_id,
                joined=None if teller is None else JoinedStream(teller),
                max_bytes=max_bytes,
            )
            if self._confirm or teller is not None:  # a streamed completion does not name its weights
                await self._confirmed(server, sent)
        except Unreachable as error:
            await self.take_out(server, error)
            raise
        except Silent as error:
            if server.alive and server.answered < sent:
                server.stuck = True
                await self.take_out(server, error, end_requests=True)
            raise
        except ModelMissing:
            # A server that was restarted has lost its adapters: then the check fails, which is retried.
            await self._confirmed(server, monotonic() + RESTART_S)
            raise
        try:
            result = read(answer)
        except EngineUnavailable as error:
            await self.take_out(server, error, end_requests=True)
            raise
        server.answered = monotonic()
        if tokens := len(getattr(result, "token_ids", ())):
            self._took.append((server.answered - sent) / tokens)
        return result

    def _limit_s(self, server: Server, max_tokens: int) -> float:
        """Return the time limit of a request, from the seconds that others took for each of their tokens.

        A server may answer its health check and no request any more.
        """
        if not max_tokens or not self._took or server.updating:
            return self.request_timeout_s
        slower = SLOWER * (1 + FEW / len(self._took))
        return min(self.request_timeout_s, max(SHORTEST_LIMIT_S, slower * max_tokens * max(self._took)))

    async def command(
        self, server: Server, path: str, body: Mapping[str, Any], *, limit_s: float | None = None
    ) -> dict[str, Any]:
        """Post a command to one server. A busy server is asked again for `retry_s` seconds.

        Args:
            server: the server; it is taken out of use if it does not carry the command out in time.
            path: path and query of the command.
            body: body of the command.
            limit_s: time limit of the request; what is left of `retry_s` if None.

        Raises:
            EngineUnavailable: The server did not carry the command out in time.
            EngineError: The server refused the command.
        """
        self._open()
        until = monotonic() + self.retry_s
        data = to_json(body)
        while True:
            left = max(until - monotonic(), FIRST_PAUSE_S)
            try:
                return await self._client.post(server, path, data, limit_s=limit_s or left, command=True)
            except EngineUnavailable as error:
                lost = isinstance(error, (Unreachable, Silent))
                if lost or left <= FIRST_PAUSE_S:
                    await self.take_out(server, error, end_requests=isinstance(error, Silent))
                    raise
            await asyncio.sleep(FIRST_PAUSE_S)

    async def get(self, server: Server, path: str) -> dict[str, Any]:
        """Get JSON from one server, once."""
        self._open()
        return await self._client.get(server, path, limit_s=self._check_limit_s)

    async def reach(self, server: Server) -> None:
        """Raise EngineError if a server does not answer its health check."""
        await self._client.reach(server, limit_s=self._check_limit_s)

    async def enough(self, number: int) -> None:
        """Wait until so many servers are used.

        Raises:
            EngineUnavailable: Fewer are used after `retry_s` seconds.
            WeightsTaken: Other trainings have so many servers that waiting cannot help.
        """
        self._open()
        began = monotonic()
        while len(live := self.live) < number:
            self._require_own(number)
            left = self.retry_s - (monotonic() - began)
            if left <= 0:
                raise EngineUnavailable(
                    f"{len(live)} of {len(self.servers)} servers can be used, and {number} are needed "
                    f"(min_servers): {self._problems()}"
                )
            await self._wait(left)
            if any(server.restoring for server in self.servers):
                began = monotonic()

    def _require_own(self, number: int) -> None:
        taken = [server.taken for server in self.servers if server.taken is not None]
        if taken and len(self.servers) - len(taken) < number:
            raise taken[0]

    @property
    def known(self) -> list[Server]:
        """The servers that are checked again and again."""
        return [server for server in self.servers if not self._asleep(server)]

    def _asleep(self, server: Server) -> bool:
        return server.watcher is None and not self._watch_all

    @property
    def live(self) -> list[Server]:
        """The servers that are used."""
        return [server for server in self.servers if server.alive]

    def release(self, session_id: str) -> None:
        """Forget to which server an episode belongs."""
        server = self._sticky.pop(session_id, None)
        if server is not None:
            server.sessions -= 1

    async def stop_watching(self) -> None:
        """Check the servers no more, and read their list no more.

        What a check had begun is ended first: its commands would open the connections again.
        """
        tasks = [self._reading, *(server.watcher for server in self.servers)]
        ending = [task for task in tasks if task is not None and not task.done()]
        self._reading = None
        for server in self.servers:
            server.watcher = None
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)

    async def close(self) -> None:
        """Close all connections."""
        await self.stop_watching()
        await self._client.close()

    # Routing --------------------------------------------------------------------------------

    async def _take(self, session_id: str | None, failing: float | None) -> Server:
        """Wait for a server with free capacity; an episode keeps its own server while that is used.

        Args:
            session_id: id of the episode.
            failing: time of the request's first failure, if there was one.
        """
        began = monotonic() if failing is None else failing
        server = self._choose(session_id)
        while server is None:
            self._require_own(1)
            left = self.retry_s - (monotonic() - began)
            if left <= 0:
                raise EngineUnavailable(f"no server has answered for {self.retry_s:g} s: {self._problems()}")
            self._waiting += 1
            try:
                await self._wait(left)
            finally:
                self._waiting -= 1
            server = self._choose(session_id)
            if any(other.alive or other.restoring for other in self.servers):
                began = monotonic()
        server.in_flight += 1
        return server

    async def _wait(self, left: float) -> None:
        """Wait until a server changes; not for long, because a restored or dead server may not tell."""
        async with self._changed:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, LONGEST_PAUSE_S))

    def _choose(self, session_id: str | None) -> Server | None:
        usable = [
            server for server in self.servers if not server.leaving and (server.alive or self._asleep(server))
        ]
        server = None
        if session_id is not None:
            own = (self._sticky.get(session_id), self._assigned())
            server = next((server for server in own if server in usable), None)
        # Each process counts only its own requests, so without a random order the ties of all processes
        # would go to the first server.
        # Requests of no episode go to idle servers, so that several at once reach them all.
        server = server or min(
            (server for server in usable if server.in_flight < self._concurrency),
            key=lambda server: (
                server.sessions if session_id is not None else 0,
                server.in_flight,
                not server.alive,
                self._ties.random(),
            ),
            default=None,
        )
        if server is None or server.in_flight >= self._concurrency:
            return None
        if self._asleep(server):
            self._begin(server)
            return None
        return server if session_id is None else self._keep(session_id, server)

    def _assigned(self) -> Server | None:
        """Return the server that a driver assigned to the running episode."""
        number = assigned_server()
        return None if number is None else self.servers[number % len(self.servers)]

    def _keep(self, session_id: str, server: Server) -> Server:
        """Let an episode belong to a server."""
        self.release(session_id)
        self._sticky[session_id] = server
        server.sessions += 1
        return server

    async def _give_back(self, server: Server) -> None:
        server.in_flight -= 1
        if server.leaving:
            server.due.set()
        if self._waiting:
            async with self._changed:
                # With several servers, the next request may wait for a different one, so all are notified.
                self._changed.notify(1 if len(self.servers) == 1 else self._waiting)

    # Watching -------------------------------------------------------------------------------

    async def take_out(self, server: Server, error: BaseException, *, end_requests: bool = False) -> None:
        """Stop using a server until it passes its check.

        Args:
            server: the server.
            error: why it is not used.
            end_requests: whether its requests in flight end too, so that they are retried elsewhere.
        """
        if server.alive:
            _log.warning("%s is taken out of use: %s", server.url, error)
        server.failures += server.alive
        server.alive, server.confirmed = False, -1.0
        server.problem = str(error)
        server.taken = error if isinstance(error, WeightsTaken) else None
        if end_requests:
            server.end_requests()
        server.due.set()
        await self._notify()

    def _begin(self, server: Server) -> None:
        server.watcher = asyncio.create_task(self._watch(server))

    async def _watch(self, server: Server) -> None:
        """Check a server again and again; take it out of use and use it again accordingly."""
        pause = FIRST_PAUSE_S
        while not (server.leaving and not server.in_flight and not server.updating):
            server.due.clear()
            failures, began = server.failures, monotonic()
            try:
                await (self.reach(server) if server.updating else self.check(server))
            except Silent as error:
                server.silent_s += self._check_limit_s
                if server.silent_s >= self.hang_s:
                    await self.take_out(server, error, end_requests=True)
                    server.due.clear()
            except EngineError as error:
                # If it only cannot be reached, its other requests may still be answered.
                await self.take_out(server, error, end_requests=not isinstance(error, EngineUnavailable))
                server.due.clear()
            except Exception as error:  # noqa: BLE001 - a check has failed, whatever it raised
                # Without its watcher, the server would never be used again and nobody would know why.
                _log.exception("checking %s failed", server.url)
                await self.take_out(server, error, end_requests=True)
                server.due.clear()
            else:
                # A failure during the check is newer than what the check found.
                if server.failures == failures and not server.updating:
                    self._use(server, began)
                    await self._notify()
                    pause = FIRST_PAUSE_S
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY_S if server.alive else pause):
                    await server.due.wait()
            if not server.alive:
                pause = min(2 * pause, LONGEST_PAUSE_S)
        await self._forget(server)

    async def _keep_list(self, listed: Callable[[], Sequence[str]]) -> None:
        """Read the list of the servers again and again; one that is away or empty changes nothing."""
        problem = ""
        while True:
            await asyncio.sleep(LIST_EVERY_S)
            try:
                urls, said = await off_loop(listed), ""
            except (EngineError, UsageError) as error:
                urls, said = [server.url for server in self.servers], str(error)
            if said and said != problem:
                _log.warning("%s; the servers stay as they are", said)
            problem = said
            self._follow(urls)

    def _follow(self, urls: Sequence[str]) -> None:
        """Let servers join and leave, until they are those of a list."""
        known = {server.url for server in self.servers}
        for server in self.servers:
            if server.leaving == (server.url in urls):
                server.leaving = not server.leaving
                server.due.set()
                if self._asleep(server):
                    self._begin(server)
        for url in urls:
            if url not in known:
                _log.info("%s joins the servers of this run", url)
                server = Server(url, alive=False)
                self.servers = [*self.servers, server]
                if self._watch_all:
                    self._begin(server)

    async def _forget(self, server: Server) -> None:
        if self.left is not None and server.alive:
            await self.left(server)
        self.servers = [other for other in self.servers if other is not server]
        _log.info("%s has left the servers of this run", server.url)
        await self._notify()

    def _use(self, server: Server, confirmed: float) -> None:
        # Invariant: nothing is awaited between the end of the check and this, so the check still holds.
        if server.failures and not server.alive:
            _log.warning("%s is used again", server.url)
        server.alive, server.problem, server.taken, server.confirmed = True, "", None, confirmed

    async def _confirmed(self, server: Server, sent: float) -> None:
        """Wait until a check has shown that the server had the expected weights when a request was sent.

        A check holds until the server can have been restarted, which takes at least `RESTART_S`.

        Raises:
            EngineUnavailable: The server was taken out of use.
        """
        if server.confirmed < sent - RESTART_S:
            server.due.set()
            async with self._changed:
                await self._changed.wait_for(lambda: server.confirmed >= sent - RESTART_S or not server.alive)
        if not server.alive:
            raise EngineUnavailable(f"{server.url} was taken out of use: {server.problem}")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _problems(self) -> str:
        away = (server for server in self.servers if not server.alive)
        return "; ".join(server.problem or f"{server.url} was not checked yet" for server in away)

    def _open(self) -> None:
        """Open the connections of this event loop, and check each server before it is used."""
        if not self._client.open():
            return
        self._changed, self.updating = asyncio.Condition(), asyncio.Lock()
        for server in self.servers:
            server.alive, server.in_flight, server.silent_s = False, 0, 0.0
            server.restoring = server.updating = False
            server.taken = None
            server.confirmed = -1.0
            server.due = asyncio.Event()
            server.limits.clear()
            server.watcher = None
            if self._watch_all:
                self._begin(server)
        if self._listed is not None:
            self._reading = asyncio.create_task(self._keep_list(self._listed))
