"""One run of several processes: the first one opens and writes it, the others send it what they have.

What is sent is kept by the first process from that moment on, also when its sender is gone before it is
collected. Nobody waits for another but at the beginning, where the first one says what run it is.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from agentenv.core.errors import AgentEnvError
from agentenv.train.world import World, own_device

__all__ = ["Launch", "LaunchFailed"]

T = TypeVar("T")


class LaunchFailed(AgentEnvError):
    """Another process of this launch failed, and says itself of what."""


class Launch:
    """The processes that torchrun started together."""

    def __init__(self) -> None:
        own_device()
        self._world = World(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.is_first = self._world.rank == 0
        host = os.environ["MASTER_ADDR"]
        own = _store(host, 0, is_master=True) if self.is_first else None
        port = self._from_first(None if own is None else own.port)
        self._store = own or _store(host, port, is_master=False)
        self._sent = count()
        self._collected = [0] * self._world.size

    def agree_on(self, decide: Callable[[], T]) -> T | None:
        """Return, in every process, what the first one decides; None where it failed in the first.

        Raises:
            Exception: In the first process, what `decide` raises.
        """
        if not self.is_first:
            return self._from_first(None)
        try:
            decided = decide()
        except Exception:
            self._from_first(None)
            raise
        return self._from_first(decided)

    def send(self, value: object) -> None:
        """Give a value to the first process; it has it when this returns."""
        key = f"{self._world.rank}/{next(self._sent)}"
        self._store.set(key, pickle.dumps(value))
        self._store.check([key])  # answered after what was set before

    def collect(self) -> Iterator[Any]:
        """Yield, in the first process, what the others sent since the last time, each one's in order."""
        for rank in range(1, self._world.size):
            while self._store.check([key := f"{rank}/{self._collected[rank]}"]):
                value = pickle.loads(self._store.get(key))  # noqa: S301 - from a process of this launch
                self._store.delete_key(key)
                self._collected[rank] += 1
                yield value

    def _from_first(self, value: Any) -> Any:
        return self._world.gather([value])[0]


def _store(host: str, port: int, *, is_master: bool) -> Any:
    # libuv's takes no more than 8 MiB at once, and an episode may have more.
    kind: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented as public
    return kind(host, port, is_master=is_master, wait_for_workers=False, use_libuv=False)
