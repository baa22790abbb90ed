"""Several processes: the same sum of weighted tokens, split over ranks.

Because a token's weight knows the whole batch, ranks need not agree on anything but sums: each takes
its own groups, however many, and the gradients are added. That is exact for replicas (one all-reduce
after the last micro-batch, in float32) and for FSDP2 shards, where every rank must make the same number
of backward passes: the shorter ones repeat a row with weight 0, and the mean that FSDP takes over the
ranks is undone by the number of ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from agentenv.core.errors import AgentEnvError
from agentenv.train.model.optim import MasterOptimizer
from agentenv.train.model.shards import take_whole_weights
from agentenv.train.sums import EXTREMES, Mean, Spread

__all__ = ["World", "own_device"]

T = TypeVar("T")

SUMMED = re.compile(r"(.*/)?(dropped/|stop/|tokens/|(mixed_)?episodes$|loss$)")
"""Metrics that add up over ranks, also those of one environment.

Of `EXTREMES` the largest or smallest is kept; what is left is averaged: times, and what all ranks share.
"""


def own_device() -> None:
    """Give each process of a launch its own CUDA device, where there are any."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is not None and torch.cuda.is_available():
        torch.cuda.set_device(int(rank) % torch.cuda.device_count())


class World:
    """The processes that train together; one alone if torch.distributed is not in use."""

    def __init__(self, device: torch.device) -> None:
        if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1 and not dist.is_initialized():
            # Numbers and objects go through gloo: it notices at once when another process is gone.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.device = device
        self.sharded = False

    def shard(self, model: Any) -> None:
        """Spread the model's parameters over the ranks, layer by layer (FSDP2)."""
        from torch.distributed.fsdp import fully_shard

        for layer in model.modules():
            if type(layer).__name__ in (getattr(model, "_no_split_modules", None) or ()):
                fully_shard(layer)
        # The parameters must be the shards again after any pass, for whoever looks at them next.
        fully_shard(model, reshard_after_forward=True)
        take_whole_weights(model)
        self.sharded = True

    def total(self, value: float) -> float:
        """Return the sum over all ranks."""
        return sum(self.gather([value]))

    def most(self, value: int) -> int:
        """Return the maximum over all ranks."""
        return max(self.gather([value]))

    @torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
    def add_gradients(self, optimizer: MasterOptimizer) -> None:
        """Sum the replicas' gradients; FSDP has done it in the backward pass."""
        if self.size == 1 or self.sharded:
            return
        masters = optimizer.masters
        used = torch.tensor([one.grad is not None for one in masters], dtype=torch.int32, device=self.device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        for master, is_used in zip(masters, used.tolist(), strict=True):
            if not is_used:
                continue
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            dist.all_reduce(master.grad)

    def merge(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics over all ranks, as one process would have them; times are averaged.

        A `Mean` or `Spread` is made anew from what the ranks counted; counts are added, extremes kept.
        """
        gathered = self.gather([dict(metrics)])
        merged: dict[str, float] = {}
        for name in dict.fromkeys(name for one in gathered for name in one):
            merged[name] = _merged(name, [one[name] for one in gathered if name in one])
        return merged

    def settle(self, error: AgentEnvError | None) -> None:
        """Raise what failed in some process in all of them, so that none waits for it.

        Raises:
            AgentEnvError: This process failed, or another.
        """
        failed = [one for one in self.gather([error and str(error)]) if one is not None]
        if error is not None:
            raise error
        if failed:
            raise AgentEnvError(f"another process failed: {failed[0]}")

    def gather(self, values: Sequence[T]) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        if self.size == 1:
            return list(values)
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, list(values))
        return [value for part in gathered for value in part]


def _merged(name: str, values: Sequence[float]) -> float:
    means = [value for value in values if isinstance(value, Mean)]
    if means:
        return float(Mean.merge(means))
    spreads = [value for value in values if isinstance(value, Spread)]
    if spreads:
        return float(Spread.merge(spreads))
    if SUMMED.match(name):
        return sum(values)
    known = [value for value in values if not isnan(value)] or values  # a rank may have had nothing
    pick = EXTREMES.get(name.rpartition("/")[2])
    return sum(known) / len(known) if pick is None else pick(known)
