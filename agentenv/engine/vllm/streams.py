"""Send weights to servers that cannot read the trainer's directories, over channels of their own (`wire`).

vLLM takes weights in four steps: init, start, update for each part, finish. A channel lasts until a
transfer over it fails. The server is then restored like one that lost its weights, over a new channel.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from agentenv.core.errors import EngineError, EngineUnavailable, UsageError
from agentenv.core.threads import off_loop
from agentenv.engine.vllm.client import Server
from agentenv.engine.vllm.plugin import BACKEND
from agentenv.engine.vllm.pool import ServerPool

if TYPE_CHECKING:
    from agentenv.engine.vllm.wire import Channel, Part

__all__ = ["MemoryDirectory", "WeightStreams"]

T = TypeVar("T")
MEMORY = Path("/dev/shm")  # noqa: S108 - files in memory under Linux; the directory made here is private
PREFIX = "agentenv-weights"
POLL_S = 0.01


class WeightStreams:
    """Sends weights to the servers of a pool.

    Args:
        pool: the servers.
        transport: "gloo" between CPUs, "nccl" between GPUs.

    Raises:
        UsageError: There is no such transport, or this torch does not have it.
    """

    def __init__(self, pool: ServerPool, transport: str) -> None:
        _require(transport)
        self._pool = pool
        self._transport = transport
        self._channels: dict[Server, Channel] = {}
        self._reading: weakref.WeakValueDictionary[tuple[str, str | None, str], asyncio.Future[Part]] = (
            weakref.WeakValueDictionary()
        )
        """Parts that are read or sent now, by directory, label and first tensor."""

    async def send(self, server: Server, directory: str | Path, label: str | None) -> None:
        """Send the weights of a directory to one server, whose requests are paused.

        Args:
            server: the server.
            directory: directory of this machine that holds the weights.
            label: label under which the server stores them; None if it stores no labels.

        Raises:
            EngineUnavailable: The server did not take the weights in time, and was taken out of use.
            EngineError: The server refused them, or cannot receive weights.
        """
        # Taken out until the whole transfer succeeded: a group of gloo or nccl in which one side gave up
        # half-way would pair the next tensor with the wrong one, so after any error the next transfer meets
        # anew.
        channel = self._channels.pop(server, None) or await self._meet(server)
        await self._start(server)
        await self._send_parts(server, channel, directory, label)
        named = {} if label is None else {"weight_version": label}
        await self._command(server, "/finish_weight_update", named)
        self._channels[server] = channel

    async def _meet(self, server: Server) -> Channel:
        """Open the channel to a server."""
        from agentenv.engine.vllm.wire import Channel, Rendezvous, address_towards

        workers = (await self._pool.get(server, "/get_world_size")).get("world_size")
        url = urlsplit(server.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        look = partial(address_towards, url.hostname or "", port, self._limit_s)
        # The server connects back to the trainer. Of several interfaces only the one through which it is
        # reached is known to be reachable from there, so a host name would be a guess.
        host = await self._in_thread(server, look)
        # Bound before its port is told, so that no other process can take the port in between.
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        meeting = Rendezvous(
            host=host,
            port=listener.getsockname()[1],
            # All workers of the server, and the trainer as rank 0.
            size=int(workers) + 1 if isinstance(workers, int) else 2,
            transport=self._transport,
            timeout_s=self._limit_s,
        )
        channel = await self._in_thread(server, partial(Channel, meeting, 0, listener=listener))
        body = {"init_info": asdict(meeting)}
        await self._step(server, channel, channel.connect, "/init_weight_transfer_engine", body)
        return channel

    async def _start(self, server: Server) -> None:
        try:
            await self._command(server, "/start_weight_update", {})
        except EngineUnavailable:
            raise
        except EngineError:  # an update that never ended is still open, and there can be only one
            await self._command(server, "/finish_weight_update", {})
            await self._command(server, "/start_weight_update", {})

    async def _send_parts(
        self, server: Server, channel: Channel, directory: str | Path, label: str | None
    ) -> None:
        from agentenv.engine.vllm.wire import parts_of, read_part

        # The files are read part by part: all weights at once would need the memory of a second model.
        pinned = self._transport == "nccl"
        for tensors in await off_loop(list, parts_of(directory)):
            # Servers that are sent a part at the same time share it: reading it costs more than sending it.
            key = (str(directory), label, next(iter(tensors)))
            if (reading := self._reading.get(key)) is None:
                reading = self._reading[key] = asyncio.ensure_future(
                    off_loop(partial(read_part, tensors, pinned=pinned))
                )
            part = await asyncio.shield(reading)
            body = {"update_info": part.description()}
            await self._step(server, channel, partial(channel.send, part), "/update_weights", body)
        await self._in_thread(server, channel.finish)

    async def _step(
        self, server: Server, channel: Channel, ours: Callable[[], None], path: str, body: dict[str, Any]
    ) -> None:
        """Send a command, and take our part in it once all workers of the server wait for us."""
        # The server answers only after the collective, and the collective blocks until the server takes part:
        # if either were awaited alone, both sides would wait for each other.
        asked = asyncio.create_task(self._command(server, path, body))
        try:
            while not channel.awaited:
                if asked.done():
                    asked.result()
                    raise EngineError(f"{server.url}{path} ended before its workers waited for the trainer")
                await asyncio.wait((asked,), timeout=POLL_S)
            await self._in_thread(server, ours)
            await asked
        finally:
            asked.cancel()

    @property
    def _limit_s(self) -> float:
        return self._pool.hang_s

    async def _command(self, server: Server, path: str, body: dict[str, Any]) -> None:
        try:
            await self._pool.command(server, path, body, limit_s=self._pool.request_timeout_s)
        except EngineUnavailable:
            raise
        except EngineError as error:
            raise EngineError(
                str(error),
                remedy="start the server with `agentenv serve --transfer`, or with agentenv installed beside "
                f'vLLM, VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'',
            ) from error

    async def _in_thread(self, server: Server, blocking: Callable[[], T]) -> T:
        try:
            return await off_loop(blocking)
        # torch.distributed raises RuntimeError for a peer that has gone.
        except (OSError, RuntimeError) as error:
            lost = EngineUnavailable(f"the weights could not be sent to {server.url}: {error}")
            await self._pool.take_out(server, lost)
            raise lost from error


class MemoryDirectory:
    """A directory in this machine's memory, for weights that wait to be sent; deleted with this object.

    Where there is no file system in memory, it is a temporary directory.
    """

    def __init__(self) -> None:
        memory = MEMORY if os.access(MEMORY, os.W_OK) else None
        if memory is not None:
            _delete_left_over(memory)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-{os.getpid()}-", dir=memory))
        self.delete = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        """Deletes the directory."""


def _delete_left_over(memory: Path) -> None:
    """Delete the directories of processes that were killed; they would hold memory for ever."""
    for path in memory.glob(f"{PREFIX}-*-*"):
        number = path.name.split("-")[2]
        with suppress(OSError):
            if (
                number.isdecimal()
                and path.stat().st_uid == os.getuid()
                and not Path(f"/proc/{number}").exists()
            ):
                shutil.rmtree(path, ignore_errors=True)


def _require(transport: str) -> None:
    if transport not in {"gloo", "nccl"}:
        raise UsageError(f"transfer is {transport!r}", remedy='choose "disk", "gloo" or "nccl"')
    import torch.distributed as dist

    # Asked when the run starts: without the check the first step of the training would fail, hours later.
    has = dist.is_gloo_available() if transport == "gloo" else dist.is_nccl_available()
    if not has:
        raise UsageError(
            f"this build of torch has no {transport}, which transfer={transport!r} needs",
            remedy='install a build for GPUs, or choose transfer="gloo" or "disk"',
        )
