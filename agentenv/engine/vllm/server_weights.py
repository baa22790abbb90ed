"""The weights that servers must have, and how they get them: pushed to those in use, restored to the others.

A server stores a label that names its weights: vLLM's own label after a start, and after a push the version
and the training that pushed it (`agentenv.engine.labels`). A server is used only while its label is the
expected one. Only the process that pushed weights restores them; all other processes wait until it has done
so. Weights of another training are never replaced, unless the user wants to take the server over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic

from agentenv.core.errors import EngineError, EngineUnavailable
from agentenv.core.visible import logger
from agentenv.engine.labels import (
    VERSION_LABEL,
    Label,
    adapter_name,
    has_adapters,
    owner_of_adapter,
    run_of_adapters,
)
from agentenv.engine.vllm.checksums import Checksums
from agentenv.engine.vllm.client import Server, WeightsTaken
from agentenv.engine.vllm.pool import ServerPool
from agentenv.engine.vllm.probe import ServerReport
from agentenv.engine.vllm.streams import WeightStreams

__all__ = ["ExpectedWeights", "ServerWeights"]

_log = logger(__name__)
Step = Callable[[Server], Awaitable[object]]

LATE_S, LATE = 5.0, 2.0
"""An update waits for its last servers this long, or this many times as long as half of them took."""
GIVE_UP_S = 10.0
"""Most seconds in which the servers are told that a training has ended."""
BROKEN_LABEL = f"{VERSION_LABEL}broken"
"""Label of weights that an update left in an unknown state; no process expects it."""


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    """The weights that every server in use has."""

    version: int
    """The weights version."""
    label: str | None
    """The label under which servers store the version; None if they store no labels."""
    path: str | None = None
    """Directory of the full weights; None for those with which the servers were started."""
    adapters: Mapping[str, str] = field(default_factory=dict[str, str])
    """Directory of each adapter, by its name on the servers: the versions that requests may still name."""
    served: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name on the servers of the newest version of each adapter that this process pushed."""
    pushed: bool = False
    """Whether this process pushed them, and so can restore them."""
    checksum: str | None = None
    """Checksum of the full weights on all servers; None if they cannot be compared."""
    run: str = ""
    """The training that pushes them; empty if no training has said its name."""
    since: str = ""
    """When the training began to use the servers."""

    def of_version(self, version: int, *, full: bool = False) -> ExpectedWeights:
        """Return the same weights under another version; `full` if these are not adapters alone."""
        if has_adapters(self.run) and not full:
            return replace(self, version=version)
        label = None if self.label is None else str(Label(version, self.run, self.since))
        return replace(self, version=version, label=label)


class _Push:
    """One update of the full weights, on all servers that take it.

    Args:
        weights: the new weights.
        checksums: compares servers.
    """

    def __init__(self, weights: ExpectedWeights, checksums: Checksums) -> None:
        self.weights, self._checksums = weights, checksums
        self.checksum: str | None = None
        """Checksum of the first server that has the weights; None if it is not known."""
        self._first = ""

    async def compare(self, server: Server) -> None:
        """Check that a server has read the same weights as those before it.

        Raises:
            EngineError: It has others.
        """
        if self.weights.adapters:
            return
        found = await self._checksums.of(server)
        if self.checksum is None:
            self.checksum, self._first = found, server.url
        elif found != self.checksum:
            raise self._checksums.different(server, f"those of {self._first}", self.weights.path)


class ServerWeights:
    """Brings weights to the servers of a pool, and checks that each server has them.

    Args:
        pool: the servers.
        report: report of the probe; it must hold for all servers.
        min_servers: number of servers that must have the new weights after an update.
        sample: function that makes a server sample one token.
        streams: sends full weights to the servers; None if they read them from a directory.
        take_over: whether to replace the weights of another training that are found at the start.
    """

    def __init__(
        self,
        pool: ServerPool,
        report: ServerReport,
        *,
        min_servers: int,
        sample: Step,
        streams: WeightStreams | None = None,
        take_over: bool = False,
    ) -> None:
        self._pool = pool
        self._report = report
        self._min_servers = min_servers
        self._sample = sample
        self._streams = streams
        self._take_over = take_over
        self._claimed = False
        self._replaced: set[str] = set()
        """Labels of other trainings that this one found at its start and may replace."""
        self._told: set[str] = set()
        """Labels of newer weights of which the user was told."""
        self.expected = ExpectedWeights(report.weights_version, report.weights_label)
        self.sampled_adapters: set[str] = set()
        """Adapters that servers have sampled from, of which they must therefore have the newest version."""
        self._has_paused = False
        """Whether this process has paused servers, so that one which returns may still be paused."""
        self._half_loaded: set[Server] = set()
        """Servers whose full weights may be mixed, because loading others failed."""
        self._late: set[asyncio.Task[None]] = set()
        """Updates of servers that took much longer than the others, and go on."""
        self._checksums = Checksums(pool, available=report.checksums, sent=streams is not None)
        pool.check = self.check

    # Whose weights -------------------------------------------------------------------------

    async def claim(self, run: str) -> None:
        """Push weights as this training from now on.

        Raises:
            WeightsTaken: Another training has pushed its weights to a server.
        """
        if self.expected.run != run:
            since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            self.expected = replace(self.expected, run=run, since=since)
        await self._require_own()
        await asyncio.gather(*map(self._forget_adapters, self._pool.servers))
        for server in self._pool.servers:
            server.taken = None
            server.due.set()

    async def _require_own(self) -> None:
        """Make sure that no server has the weights of another training."""
        if not self.expected.run or self._report.weights_label is None:
            return
        servers = self._pool.servers
        if self._claimed:  # a server that does not answer must not delay each update
            servers = [server for server in servers if server.alive or server.taken is not None]
        for server, text in zip(servers, await asyncio.gather(*map(self._label_of, servers)), strict=True):
            if text is None or not self._is_foreign(text, self.expected):
                continue
            label = Label.read(text)
            assert label is not None
            # An adapter needs the weights below it, which another training has changed.
            if self._claimed or not self._take_over or has_adapters(self.expected.run):
                raise WeightsTaken.of(server.url, label)
            _log.warning("%s is taken over from the training %s, which ends", server.url, label.run)
            self._replaced.add(text)
        self._claimed = True

    async def _served_by(self, server: Server) -> set[str]:
        """Return the names of the model and the adapters that a server serves."""
        served: object = (await self._pool.get(server, "/v1/models")).get("data")
        entries = served if isinstance(served, list) else []
        return {str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry}

    async def _forget_adapters(self, server: Server) -> None:
        """Unload what a killed process of this training left; refuse to change what others' adapters need.

        Raises:
            WeightsTaken: Another training has adapters on the server, which need its present weights.
        """
        run = self.expected.run
        if not self._report.lora or not run:
            return
        names: set[str] = set()
        with suppress(EngineError):  # a server that does not answer is not used
            names = await self._served_by(server)
        for name in names:
            owner = owner_of_adapter(name)
            if not owner or owner == run:
                continue
            if owner.rpartition(".")[0] == run.rpartition(".")[0]:
                await self._unload(server, name)
            elif not has_adapters(run):
                if not self._take_over:
                    raise WeightsTaken.of(server.url, Label(0, owner))
                _log.warning("%s is taken over from the training %s, which ends", server.url, owner)
                await self._unload(server, name)

    async def _label_of(self, server: Server) -> str | None:
        """Return the label of a server; None if it does not tell it now."""
        with suppress(EngineError):
            return str((await self._pool.get(server, "/weight_info")).get("weight_version"))
        return None

    def _is_foreign(self, text: str, expected: ExpectedWeights) -> bool:
        """Whether a label names weights that this process may neither use nor replace."""
        label = Label.read(text)
        if label is None or text in self._replaced:
            return False
        # A process that nobody told stays with the training whose weights it found.
        found = Label.read(expected.label)
        own = expected.run or ("" if found is None else found.run)
        return bool(label.run) and label.run != own and bool(own or expected.pushed)

    async def give_up(self) -> None:
        """Let other trainings have the servers, with the weights that they have."""
        for task in self._late:
            task.cancel()
        if self._late:
            await asyncio.wait(set(self._late), timeout=GIVE_UP_S)
        if not (self._claimed and self.expected.pushed):
            return
        await asyncio.gather(*map(self.leave, self._pool.servers))
        self._claimed = False
        if has_adapters(self.expected.run) and self.expected.adapters:
            return  # they are loaded again if this process goes on
        self.expected = replace(self.expected, run="").of_version(self.expected.version)

    async def leave(self, server: Server) -> None:
        """Let other trainings have a server, with the weights that it has."""
        if not (self._claimed and self.expected.pushed):
            return
        adapters = self.expected.adapters if has_adapters(self.expected.run) else {}
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_S):
                await self._unload_all(server, adapters)
                if not adapters and await self._label_of(server) == self.expected.label:
                    await self._label(server, str(Label(self.expected.version)))

    def follow(self, run: str, version: int) -> None:
        """Expect weights that another process of a training has pushed under this version."""
        if not self._claimed and self.expected.run != run:
            self.expected = replace(self.expected, run=run)
        self.expect(version)

    def expect(self, version: int) -> None:
        """Expect weights that another process has pushed under this version."""
        new = self.expected.of_version(version)
        if new != self.expected:
            self.expected = new
            for server in self._pool.servers:
                server.due.set()

    # Checking -------------------------------------------------------------------------------

    async def check(self, server: Server) -> None:
        """Make sure that a server has the expected weights; restore them if this process pushed them.

        Raises:
            EngineUnavailable: The server cannot be reached, or does not answer.
            WeightsTaken: The server has the weights of another training.
            EngineError: The server has other weights, which another process has to restore.
        """
        while True:
            expected = self.expected
            problem = await self._problem(server, expected)
            if server.updating:
                return  # the update decides
            if problem and self.expected is not expected:
                continue  # it may be one of weights that were replaced during the question
            if problem and not (expected.pushed or server.tainted):
                raise EngineError(
                    f"{server.url} {problem}", remedy="push them again from the process that trains them"
                )
            if problem or server.tainted:
                await self._restore(server, expected, problem or "its last update failed")
            elif self._has_paused and not server.alive:
                await self._resume(server)
            if server.stuck:
                await self._sample(server)
                server.stuck = False
            # An update may have happened while the server was checked, and then it was checked for the wrong
            # version.
            if self.expected is expected:
                return

    async def _problem(self, server: Server, expected: ExpectedWeights) -> str:
        """Return how the weights of a server differ from the expected ones; empty if they do not."""
        if expected.label is not None:
            label = str((await self._pool.get(server, "/weight_info")).get("weight_version"))
            if label == expected.label:
                return await self._missing(server, expected) if has_adapters(expected.run) else ""
            named = Label.read(label)
            if named is not None and self._is_foreign(label, expected):
                raise WeightsTaken.of(server.url, named)
            if has_adapters(expected.run) and expected.path is None:
                raise EngineError(
                    f"{server.url} has other weights below the adapters of this training: {label!r} and not "
                    f"{expected.label!r}",
                    remedy="restart all servers from the same weights",
                )
            if expected.pushed or named is None:
                pass
            elif self._claimed:  # whatever is there, this training replaces it
                return ""
            elif named.version >= expected.version:
                # The process that pushes is told of a new version before all others, so theirs may be behind.
                self._tell_of(server, label)
                self.expected = replace(expected, version=named.version, label=label)
                return ""
            return f"has weights with the label {label!r} and not {expected.label!r}"
        if expected.pushed and not server.alive:
            return "may have lost its weights"
        return await self._missing(server, expected)

    async def _missing(self, server: Server, expected: ExpectedWeights) -> str:
        """Return which adapter a server lacks; empty if it has all."""
        wanted = {*expected.adapters, *map(self.served_name, self.sampled_adapters)}
        if not wanted:
            await self._pool.reach(server)
            return ""
        missing = wanted - await self._served_by(server)
        return f"has no adapter {min(missing)!r}" if missing else ""

    def _tell_of(self, server: Server, label: str) -> None:
        """Say once that a training has changed the weights while this process plays, if nobody else does."""
        if self.expected.run or label in self._told:
            return
        self._told.add(label)
        _log.warning(
            "%s has newer weights (%s) than before (%s): a training pushes them. Each token says the version "
            "that sampled it",
            server.url,
            label,
            self.expected.label,
        )

    async def _restore(self, server: Server, expected: ExpectedWeights, problem: str) -> None:
        """Load the expected weights into a server that has others.

        Requests of other processes, which may still sample there, wait meanwhile: between the loading and the
        naming, their tokens would be of the new weights under the name of the old ones.
        """
        lost = EngineUnavailable(f"{server.url} {problem}; version {expected.version} is being restored")
        await self._pool.take_out(server, lost, end_requests=True)
        server.restoring = True
        try:
            await self._pause(server)
            if expected.path is not None:
                await self._load(server, expected.path, expected.label)
                if not expected.adapters:  # these may be counted too, and come after
                    await self._checksums.require(server, expected.checksum, expected.path)
            elif (path := self._first_path(server)) is not None:
                await self._read(server, path)
            for name, directory in expected.adapters.items():
                await self.load_lora(server, name, directory)
            await self._label(server, expected.label)
            await self._resume(server)
            server.tainted = False
            self._half_loaded.discard(server)
        except BaseException as error:
            with suppress(TimeoutError):  # one that hangs holds up neither the next check nor the end
                async with asyncio.timeout(GIVE_UP_S):
                    if expected.path is not None:
                        await self._taint(server, error)
                    await self._go_on(server)
            raise
        finally:
            server.restoring = False

    def _first_path(self, server: Server) -> str | None:
        """Return the path of the weights before any full weights were pushed; None if the server has them.

        Raises:
            EngineError: Another process pushed those weights, so their path is not known.
        """
        if server in self._half_loaded and self._report.weights_version:
            raise EngineError(
                f"{server.url} cannot get version {self._report.weights_version} back, which another process "
                "pushed",
                remedy="restart the server and push the weights again",
            )
        if self._report.weights_version:
            _log.warning(
                "%s gets its adapters back; its full weights are those that it was started with", server.url
            )
        return self._report.model_path if server in self._half_loaded else None

    # Updating -------------------------------------------------------------------------------

    async def update(self, path: str | Path, version: int | None) -> int:
        """Bring full weights to all servers in use, each for itself: pause, load, name the version, resume.

        A server that drops out in the meantime gets the weights when it returns, and so does one that takes
        much longer than the others.

        Returns:
            The new weights version.

        Raises:
            EngineUnavailable: Fewer than `min_servers` servers have the new weights.
            WeightsTaken: Another training has pushed its weights to a server.
            EngineError: A server refused. The servers go back to the weights that they had before.
        """
        await self._pool.enough(self._min_servers)
        async with self._pool.updating:
            await self._require_own()
            before = self.expected
            new = before.of_version(before.version + 1 if version is None else version, full=True)
            self.expected = replace(new, path=str(path), checksum=None, pushed=True)
            members, push = self._pool.live, _Push(self.expected, self._checksums)
            for server in members:  # before anything is awaited, or a check would restore them
                server.updating = True
            loading: dict[asyncio.Task[None], Server] = {}
            try:
                if not self.expected.adapters:  # these may be counted too
                    await self._checksums.begin(members)
                loading |= {asyncio.create_task(self._bring(server, push)): server for server in members}
                await self._all_but_late(loading)
            except BaseException as error:
                await self._go_back(loading, error)
                self.expected = before
                for server in members:
                    self._check_again(server)
                raise
            if push.checksum is not None:
                self.expected = replace(self.expected, checksum=push.checksum)
        await self._pool.enough(self._min_servers)
        return self.expected.version

    async def _bring(self, server: Server, push: _Push) -> None:
        """Bring new weights to one server; its requests in flight are paused meanwhile, and no others."""
        path, label = push.weights.path, push.weights.label
        assert path is not None
        try:
            await self._pause(server)
            try:
                await self._load(server, path, label)
                await push.compare(server)
                await self._label(server, label)
            except BaseException as error:
                await self._taint(server, error)
                raise
        except EngineUnavailable:
            await self._go_on(server)
            self._check_again(server)
            raise
        except BaseException:  # the update decides
            await self._go_on(server)
            raise
        await self._go_on(server)
        self._check_again(server)

    def _check_again(self, server: Server) -> None:
        server.updating = False
        server.due.set()

    async def _go_on(self, server: Server) -> None:
        with suppress(EngineUnavailable):
            await self._resume(server)

    async def _all_but_late(self, loading: Mapping[asyncio.Task[None], Server]) -> None:
        """Wait until all servers have new weights, or enough of them, and the others are very late.

        Raises:
            EngineError: A server refused.
        """
        began, until, waiting = monotonic(), None, set(loading)
        enough = max(self._min_servers, len(loading) // 2)
        while waiting:
            left = None if until is None else until - monotonic()
            if left is not None and left <= 0:
                break
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is not None and not isinstance(error, EngineUnavailable):
                    raise error
            if until is None and sum(task.done() and not task.exception() for task in loading) >= enough:
                until = monotonic() + max(LATE_S, LATE * (monotonic() - began))
        for task in waiting:
            late = EngineUnavailable(f"{loading[task].url} still loads version {self.expected.version}")
            await self._pool.take_out(loading[task], late, end_requests=True)
            self._late.add(task)
            task.add_done_callback(partial(self._settle_late, loading[task]))

    def _settle_late(self, server: Server, task: asyncio.Task[None]) -> None:
        self._late.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("%s did not take its weights: %s", server.url, error)
        self._check_again(server)

    async def _go_back(self, loading: Mapping[asyncio.Task[None], Server], error: BaseException) -> None:
        """Stop using servers that have, or may have, weights of an update that failed."""
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        for server in loading.values():
            await self._taint(server, error)

    async def _taint(self, server: Server, error: BaseException) -> None:
        """Stop using a server whose weights are not known after an update that failed."""
        server.tainted = True
        self._half_loaded.add(server)
        await self._pool.take_out(server, error, end_requests=True)
        with suppress(EngineError):  # so that no other process takes them for the weights before
            await self._label(server, BROKEN_LABEL)

    async def update_adapter(self, adapter: str, path: str | Path, version: int | None) -> int:
        """Load a version of an adapter beside the one before, and use it for all requests from now on.

        It has a name of its own, so the requests in flight end with the version that they began with, nothing
        of other trainings is paused, and no cache of one version serves another.

        Returns:
            The new weights version.

        Raises:
            EngineUnavailable: Fewer than `min_servers` servers have it.
            WeightsTaken: Another training has changed the weights below it.
            EngineError: A server refused it. All requests go on with the version before.
        """
        if not has_adapters(self.expected.run):
            await self.claim(run_of_adapters(self.expected.run))
        await self._pool.enough(self._min_servers)
        async with self._pool.updating:
            await self._require_own()
            before = self.expected
            new = before.of_version(before.version + 1 if version is None else version)
            served = adapter_name(adapter, new.run, new.version)
            members = self._pool.live
            await _each(members, lambda server: self.load_lora(server, served, path))
            last = before.served.get(adapter)
            old = {name for name in before.adapters if name.startswith(f"{adapter}@")} - {last, served}
            kept = {name: place for name, place in before.adapters.items() if name not in old}
            self.expected = replace(
                new,
                adapters={**kept, served: str(path)},
                served={**before.served, adapter: served},
                pushed=True,
            )
            for server in self._pool.servers:
                server.due.set()
            await _each(members, lambda server: self._unload_all(server, old))
        await self._pool.enough(self._min_servers)
        return self.expected.version

    def served_name(self, adapter: str) -> str:
        """Return the name of an adapter on the servers, where those of other trainings may be too."""
        now = self.expected
        if adapter in now.served or adapter not in self._report.adapters:
            return now.served.get(adapter) or adapter_name(adapter, now.run, now.version)
        return adapter

    async def _unload_all(self, server: Server, names: Iterable[str]) -> None:
        for name in names:
            await self._unload(server, name)

    async def _unload(self, server: Server, name: str) -> None:
        with suppress(EngineError):  # it is gone with a server that was restarted
            await self._pool.command(server, "/v1/unload_lora_adapter", {"lora_name": name})

    async def _load(self, server: Server, path: str | Path, label: str | None) -> None:
        if self._streams is None:
            await self._read(server, path)
        else:
            await self._streams.send(server, path, label)
            await self._drop_cache(server)

    async def reload(self) -> None:
        """Let servers that lost their weights while they slept read them again from their directories."""
        source = self.expected.path or self._report.model_path
        assert source is not None, "a server of one's own was started from a directory"
        async with self._pool.updating:
            for server in self._pool.live:
                await self._pause(server)
                try:
                    await self._read(server, source)
                finally:
                    await self._resume(server)

    async def _read(self, server: Server, path: str | Path) -> None:
        """Have a server read full weights from a directory of its own."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        await self._pool.command(server, "/collective_rpc", body, limit_s=self._pool.request_timeout_s)
        await self._drop_cache(server)

    async def _drop_cache(self, server: Server) -> None:
        # Keys and values of the old weights would be combined with new ones, which no later check of logprobs
        # could tell from other noise.
        answer = await self._pool.command(server, "/reset_prefix_cache?reset_running_requests=true", {})
        if answer.get("success") is False:
            raise EngineError(
                f"{server.url} did not drop the prefix cache of the old weights", remedy="restart the server"
            )

    async def load_lora(self, server: Server, name: str, path: str | Path) -> None:
        """Load an adapter from a directory; it replaces one of the same name."""
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
        await self._pool.command(server, "/v1/load_lora_adapter", body, limit_s=self._pool.request_timeout_s)

    async def _label(self, server: Server, label: str | None) -> None:
        if label is not None and self._report.weights_label is not None:
            await self._pool.command(server, "/update_weight_version", {"new_version": label})

    async def _pause(self, server: Server) -> None:
        """Pause the requests in flight, if the server can, so that the version of each token is known."""
        if self._report.dev_mode:
            # Set before the command: it may have reached the server although its answer was lost.
            self._has_paused = True
            await self._pool.command(server, "/pause?mode=keep", {})

    async def _resume(self, server: Server) -> None:
        if self._report.dev_mode:
            await self._pool.command(server, "/resume", {})


async def _each(servers: Sequence[Server], step: Step) -> None:
    """Take a step with every server at once.

    A server that cannot be reached has been taken out of use and takes no further step. Any other error is
    raised, after all servers have taken the step.
    """
    results = await asyncio.gather(
        *(step(server) for server in servers if server.alive or server.tainted), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineUnavailable):
            raise result
