"""Communication between the processes of one run: the first process writes, the others send it values.

The first process stores a value from the moment it is sent, even if the sender ends before the value is
collected. Processes wait for each other only at the beginning, when the first one decides on the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from agentenv.core.errors import AgentEnvError
from agentenv.runs.store.codec import dumps
from agentenv.training.learners.torch.world import World, own_device

__all__ = ["Launch", "LaunchFailed"]

T = TypeVar("T")


class LaunchFailed(AgentEnvError):
    """Another process of this launch failed and reports the error itself."""


class Launch:
    """The processes that torchrun started together."""

    def __init__(self) -> None:
        own_device()
        self._world = World(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.is_first = self._world.rank == 0
        host = os.environ["MASTER_ADDR"]
        # The first process lets the system pick a port and tells it to the others.
        master = _store(host, 0, is_master=True) if self.is_first else None
        port = self._from_first(None if master is None else master.port)
        self._store = master or _store(host, port, is_master=False)
        self._sent = count()
        self._collected = [0] * self._world.size

    def agree_on(self, decide: Callable[[], T]) -> T | None:
        """Return the first process's decision in every process; the others get None if it failed.

        Raises:
            Exception: The exception of `decide`, in the first process only.
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
        """Send a value to the first process, which has stored it when this method returns.

        Args:
            value: a value with a JSON type. It is not pickled, because the store has no password: whoever
                reaches its port could send the first process a pickle that runs code.
        """
        key = f"{self._world.rank}/{next(self._sent)}"
        self._store.set(key, dumps(value))
        self._store.check([key])  # the store answers this after the `set` above

    def collect(self) -> Iterator[Any]:
        """Yield, in the first process, the values sent since the last call, in order for each sender."""
        for rank in range(1, self._world.size):
            while self._store.check([key := f"{rank}/{self._collected[rank]}"]):
                value = json.loads(self._store.get(key))
                self._store.delete_key(key)
                self._collected[rank] += 1
                yield value

    def _from_first(self, value: Any) -> Any:
        return self._world.gather([value])[0]


def _store(host: str, port: int, *, is_master: bool) -> Any:
    # The libuv backend accepts at most 8 MiB per value, and an episode may be larger.
    kind: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented as public
    return kind(host, port, is_master=is_master, wait_for_workers=False, use_libuv=False)
