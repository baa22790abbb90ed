"""What travels from a trainer to the workers of a vLLM server: weights in parts, over a process group.

1. Each server has a group of its own, with the trainer at rank 0 and the server's workers after it.
2. A part holds whole tensors, each at a multiple of 16 bytes, so that a receiver can read it as tensors of
   any format. The trainer describes a part in its request to the server, and broadcasts the bytes.
3. The trainer joins each step only when all workers wait for it there. A server that refuses a request
   therefore never leaves the trainer waiting in a call that cannot be interrupted.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch

from agentenv.core.torch_internals import gloo_group, nccl_group

__all__ = ["Channel", "Part", "Rendezvous", "address_towards", "parts_of", "read_part"]

PART_BYTES = 256 * 1024**2
"""Size at which a part is full; a larger tensor has a part of its own."""
ALIGNMENT = 16
_c10d: Any = torch.distributed  # whose types name only a part of what it has


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the trainer and the workers of one server meet."""

    host: str
    """Address of the trainer, as the server sees it."""
    port: int
    """Port on which the trainer waits for the workers."""
    size: int
    """Number of workers plus one."""
    transport: str
    """What carries the bytes: "gloo" between CPUs, "nccl" between GPUs."""
    timeout_s: float
    """Seconds after which a transfer that does not go on has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A number of tensors, and their bytes."""

    names: list[str]
    dtypes: list[str]
    """Number format of each tensor, under its name in torch."""
    shapes: list[list[int]]
    size: int
    """Number of bytes."""
    checksum: int
    """Sum of the 8-byte words, modulo 2**64 and signed."""
    content: torch.Tensor
    """The bytes, of shape [size]."""

    def description(self) -> dict[str, Any]:
        """Return everything but the bytes, as plain values."""
        return {name: getattr(self, name) for name in ("names", "dtypes", "shapes", "size", "checksum")}


class Channel:
    """The connections between a trainer and the workers of one server.

    Args:
        meeting: where they meet.
        rank: 0 for the trainer, otherwise one more than the number of the worker.
        listener: the socket on which the trainer waits.

    Raises:
        RuntimeError: The trainer cannot be reached.
    """

    def __init__(self, meeting: Rendezvous, rank: int, *, listener: socket.socket | None = None) -> None:
        self._meeting = meeting
        self._rank = rank
        self._step = 0
        self._group: Any = None
        self._received: list[tuple[torch.Tensor, int]] = []
        """Checksum of each part since the last `verify`, on its device, and what it should be."""
        self._store = _c10d.TCPStore(
            meeting.host,
            meeting.port,
            meeting.size,
            is_master=rank == 0,
            timeout=self._limit,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self._meeting.timeout_s)

    @property
    def awaited(self) -> bool:
        """Whether all workers wait for the trainer at the next step."""
        return self._store.check([f"{self._step}-{rank}" for rank in range(1, self._meeting.size)])

    def connect(self) -> None:
        """Make the process group: the first step."""
        meeting, rank = self._meeting, self._rank
        self._announce()
        if meeting.transport == "nccl":
            self._group = nccl_group(self._store, rank, meeting.size, limit=self._limit)
            return
        own = meeting.host if rank == 0 else address_towards(meeting.host, meeting.port, meeting.timeout_s)
        self._group = gloo_group(self._store, rank, meeting.size, address=own, limit=self._limit)

    def send(self, part: Part) -> None:
        """Broadcast the bytes of a part: one step."""
        nccl = self._meeting.transport == "nccl"
        self._broadcast(part.content.to("cuda", non_blocking=True) if nccl else part.content)

    def finish(self) -> None:
        """Wait until everything that was sent has left the device."""
        if self._meeting.transport == "nccl":
            torch.cuda.synchronize()

    def receive(
        self, described: Mapping[str, Any], device: torch.device | str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive a part that `Part.description` describes: one step. Return its tensors with their names.

        The part may still be on its way to the device. `verify` tells whether it arrived as it was sent.
        """
        content = torch.empty(described["size"], dtype=torch.uint8, device=device)
        self._announce()
        self._broadcast(content)
        self._received.append((_checksum(content), described["checksum"]))
        return _tensors(content, described)

    def verify(self) -> None:
        """Wait for all parts that were received, and compare them with what was sent.

        Raises:
            ValueError: The bytes of a part are not those that were sent.
        """
        received, self._received = self._received, []
        for found, sent in received:
            if int(found) != sent:
                raise ValueError(f"a part of the weights arrived with checksum {int(found)}, not {sent}")

    def _announce(self) -> None:
        if self._rank:
            self._store.set(f"{self._step}-{self._rank}", "")
        self._step += 1

    def _broadcast(self, content: torch.Tensor) -> None:
        if self._rank == 0:
            self._step += 1
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        # On CUDA this lets the stream wait, not this thread, which waits in `finish` or `verify`.
        self._group.broadcast([content], options).wait()


def parts_of(directory: str | Path) -> Iterator[dict[str, torch.Tensor]]:
    """Divide the weights in a directory, files of the format safetensors, into parts; read none of them."""
    from safetensors import safe_open

    waiting: dict[str, torch.Tensor] = {}
    size = 0
    for file in sorted(Path(directory).glob("*.safetensors")):
        with cast("Any", safe_open)(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - this is no mapping
                tensor = tensors.get_tensor(name)
                if waiting and size + tensor.nbytes > PART_BYTES:
                    yield waiting
                    waiting, size = {}, 0
                waiting[name] = tensor
                size += tensor.nbytes
    if waiting:
        yield waiting


def read_part(tensors: Mapping[str, torch.Tensor], *, pinned: bool = False) -> Part:
    """Read the tensors of one part into one piece of memory, pinned for a device that will copy it itself."""
    size = sum(_padded(tensor.nbytes) for tensor in tensors.values())
    content = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
    start = 0
    for tensor in tensors.values():
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        content[start : start + flat.numel()] = flat
        start += _padded(flat.numel())
    return Part(
        names=list(tensors),
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        shapes=[list(tensor.shape) for tensor in tensors.values()],
        size=content.numel(),
        checksum=int(_checksum(content)),
        content=content,
    )


def address_towards(host: str, port: int, timeout_s: float) -> str:
    """Return this machine's address on the way to another one."""
    with socket.create_connection((host, port), timeout_s) as connection:
        return connection.getsockname()[0]


def _tensors(content: torch.Tensor, described: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    start = 0
    for name, dtype, shape in zip(described["names"], described["dtypes"], described["shapes"], strict=True):
        kind: torch.dtype = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        yield name, content[start : start + size].view(kind).view(shape)
        start += _padded(size)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _checksum(content: torch.Tensor) -> torch.Tensor:
    return content.view(torch.int64).sum()
