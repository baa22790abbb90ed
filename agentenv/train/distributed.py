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

from agentenv.train.optim import MasterOptimizer

__all__ = ["World", "own_device"]

T = TypeVar("T")

SUMMED = re.compile(r"(.*-v\d+/)?(dropped/|stop/|tokens/|episodes$|loss$)|staleness/mixed_episodes$")
"""Metrics that add up over ranks, also those of one environment."""
EXTREMES = {"max": max, "max_length": max, "abs_max": max, "min_length": min}
"""Metrics, by the end of their name, of which the largest or smallest is kept. The others are averaged."""


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
        fully_shard(model)
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
        """Return metrics over all ranks: counts added, extremes kept, the rest averaged."""
        if self.size == 1:
            return dict(metrics)
        gathered = self.gather([dict(metrics)])
        merged: dict[str, float] = {}
        for name in dict.fromkeys(name for one in gathered for name in one):
            merged[name] = _merged(name, [one[name] for one in gathered if name in one])
        return merged

    def gather(self, values: Sequence[T]) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        if self.size == 1:
            return list(values)
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, list(values))
        return [value for part in gathered for value in part]


def _merged(name: str, values: Sequence[float]) -> float:
    if SUMMED.match(name):
        return sum(values)
    known = [value for value in values if not isnan(value)] or values  # a rank may have had nothing
    pick = EXTREMES.get(name.rpartition("/")[2])
    return sum(known) / len(known) if pick is None else pick(known)
