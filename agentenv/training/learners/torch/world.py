"""Training in several processes: the sum over weighted tokens is split over the ranks.

A token's weight is computed over the whole batch, so it does not matter which rank trains on which row:
`balance` deals the rows out so that all ranks have about as many tokens, and the gradients are added.
This is exact for replicas (one all-reduce in float32 after the last micro-batch) and for FSDP2 shards, whose
gradients are also added in float32 and then rounded to the format of the weights: once in each step, or once
for each micro-batch where a device has no room for the gradients of the whole model
(`Policy.reduces_each_pass`). If several groups of ranks each share a copy of the model, the copies add
their shards' gradients once in each step in either case. With shards every rank must make the same number of
backward passes, so ranks with fewer micro-batches add some of weight 0; and the loss is multiplied by the
number of ranks, because FSDP averages gradients over the ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from math import isnan
from threading import Thread
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from agentenv.core.errors import AgentEnvError, UsageError
from agentenv.core.transformers_internals import split_layers
from agentenv.core.visible import logger
from agentenv.training.learners.torch.optim import MasterOptimizer
from agentenv.training.learners.torch.shards import checksum, copy_from_first, take_whole_weights
from agentenv.training.metrics import EXTREMES, Mean, Spread

__all__ = ["World", "num_processes", "own_device", "raise_together", "shares_device"]

T = TypeVar("T")
log = logger(__name__)

BUCKET_BYTES = 32 << 20
"""Most bytes of gradients that replicas add in one message; a larger gradient has a message of its own."""

LONGEST_WAIT = timedelta(days=1)
"""Longest time that a process waits for another, such as for its longest episode. A process that has ended is
noticed at once."""

MOST_APART_S = 120.0
"""Longest time for which a process in which a check was broken off waits for the others."""

SUMMED = re.compile(r"(.*/)?(dropped/|stop/|tokens/|(mixed_)?episodes$|loss$)")
"""Names of metrics that are summed over ranks, including those of a single environment.

Metrics named in `EXTREMES` keep their largest or smallest value. All others are averaged: times, and values
that are equal on all ranks.
"""


def own_device() -> None:
    """Assign each process of a launch its own CUDA device, if the machine has any."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is not None and torch.cuda.is_available():
        torch.cuda.set_device(int(rank) % torch.cuda.device_count())


def shares_device() -> bool:
    """Return whether processes of this launch share a GPU, on which NCCL connects no two of them.

    gloo then moves their gradients through main memory.
    """
    here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if here > devices:
        log.warning(
            "%d processes share %d GPU%s, where NCCL connects no two of them: gloo takes its place, through "
            "main memory",
            here,
            devices,
            "s" * (devices > 1),
        )
    return here > devices


def num_processes() -> int:
    """Return how many processes train together, as torchrun or the caller has set them up."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def raise_together(error: Exception, device: str) -> NoReturn:
    """Raise an error, and tell the other processes of the launch, which would wait for this one.

    Args:
        error: what this process failed with before it had a `World`.
        device: the option that names the device of the training.
    """
    if dist.is_initialized() or "RANK" in os.environ:
        cuda = torch.cuda.is_available() and device != "cpu"
        World(torch.device("cuda" if cuda else "cpu")).settle(error)
    raise error


class World:
    """The processes that train together; a single process if torch.distributed is not in use.

    Args:
        device: device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        if num_processes() > 1 and not dist.is_initialized():
            # Numbers and objects go through gloo, which notices at once when another process has ended.
            nccl = device.type == "cuda" and not shares_device()
            dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo")
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        # A group of its own, because episodes of different processes may end hours apart. A hang of the
        # collectives on the device is still found by the shorter limit of the default group.
        self.values: Any = None
        """The group through which the ranks exchange values; None for the default group."""
        if self.size > 1:
            self.values = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
        self.device = device
        self.sharded = False
        self.mesh: Any = None
        """The ranks over which `shard` shards; None for all of them. Of two dimensions the first counts the
        copies of the model."""

    def share_weights(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Give all replicas the weights of the first rank; return the names of those that were different.

        Raises:
            UsageError: The ranks have models of different shapes.
        """
        if self.size == 1:
            return []
        shapes = self.gather([[(name, tuple(one.shape), one.dtype) for name, one in weights.items()]])
        if any(one != shapes[0] for one in shapes):
            raise UsageError(
                "the processes have models of different shapes", remedy="load the same model in each of them"
            )
        sums = self.gather([[checksum(one) for one in weights.values()]])
        unequal = [
            name for name, *found in zip(weights, *sums, strict=True) if any(one != found[0] for one in found)
        ]
        for name in unequal:
            copy_from_first(weights[name])
        return unequal

    def shard(self, model: Any, *, size: int | None = None) -> None:
        """Shard the model's parameters over the ranks, layer by layer (FSDP2).

        Gradients of low precision are summed over the ranks in float32.

        Args:
            model: the model.
            size: number of neighbouring ranks that share a copy of the model; None means all ranks.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        if self.mesh is None and size is not None and size < self.size:
            from torch.distributed.device_mesh import init_device_mesh

            grid = (self.size // size, size)
            self.mesh = init_device_mesh(self.device.type, grid, mesh_dim_names=("replicate", "shard"))
        low = next(model.parameters()).dtype.itemsize < torch.float32.itemsize
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if low else None)
        for parameter in model.parameters():  # FSDP takes no matrices that are stored input-major
            parameter.data = parameter.data.contiguous()
        for layer in split_layers(model):
            fully_shard(layer, mesh=self.mesh, mp_policy=precision)
        # After any pass the parameters must be shards again, because the optimiser and checkpoints read them.
        fully_shard(model, mesh=self.mesh, reshard_after_forward=True, mp_policy=precision)
        take_whole_weights(model)
        self.sharded = True

    def reduce_gradients(self, model: Any, *, each: bool, last: bool) -> None:
        """Say whether the next backward pass of a sharded model adds the gradients over the ranks.

        Otherwise each rank keeps the sum of its own gradients, whole, in the format in which they are added.
        Copies of the model add the gradients of their shards in the last pass only.

        Args:
            model: the model.
            each: whether the ranks that share a copy add the gradients in each pass.
            last: whether the pass is the last one of the step.
        """
        if self.sharded:
            model.set_requires_gradient_sync(each or last)
            model.set_requires_all_reduce(last)

    def total(self, value: float) -> float:
        """Return the sum over all ranks."""
        return sum(self.gather([value]))

    def most(self, value: int) -> int:
        """Return the maximum over all ranks."""
        return max(self.gather([value]))

    @torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
    def add_gradients(self, optimizer: MasterOptimizer) -> None:
        """Sum the replicas' gradients. FSDP has already done this in the backward pass."""
        if self.size == 1 or self.sharded:
            return
        self.gather([])  # wait here for the last process, with the longer limit
        sums = optimizer.sums
        used = torch.tensor([one.grad is not None for one in sums], dtype=torch.int32, device=self.device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        grads: list[torch.Tensor] = []
        for total, is_used in zip(sums, used.tolist(), strict=True):
            if is_used:
                total.grad = torch.zeros_like(total) if total.grad is None else total.grad
                grads.append(total.grad)
        for bucket in _buckets(grads):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat)
            for grad, part in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(part.view(grad.shape))

    def merge(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics over all ranks, as one process would have them; times are averaged.

        A `Mean` or `Spread` is merged exactly, counts are added, and of extremes the largest or smallest is
        kept.
        """
        gathered = self.gather([dict(metrics)])
        merged: dict[str, float] = {}
        for name in dict.fromkeys(name for part in gathered for name in part):
            merged[name] = _merged(name, [part[name] for part in gathered if name in part])
        return merged

    def settle(self, error: Exception | None, *, in_a_pass: bool = False) -> None:
        """Raise the error of one process in all processes, so that none waits for it.

        Args:
            error: the error of this process, if it has one.
            in_a_pass: whether the others may never come, because a pass of a sharded model was broken off and
                they wait in it. A process with an error then waits for them a limited time.

        Raises:
            Exception: The error of this process.
            AgentEnvError: Another process failed.
        """
        if error is None:
            self.gather([])
            return
        told = str(error) if isinstance(error, AgentEnvError) else f"{type(error).__name__}: {error}"
        with suppress(AgentEnvError):  # others may have failed too, or not come
            self._exchange(_Failed(told), MOST_APART_S if in_a_pass else None)
        raise error

    def agreed(self, reason: str) -> str:
        """Return the reason of the first process that has one, so that all decide alike.

        With a sharded model a process with a reason waits for the others a limited time, as in `settle`.

        Args:
            reason: why this process decides against something; empty if it does not.

        Raises:
            AgentEnvError: The others did not come, or one of them failed.
        """
        told: list[str] = self._exchange([reason], MOST_APART_S if reason and self.sharded else None)
        return next(filter(None, told), "")

    def gather(self, values: Sequence[T]) -> list[T]:
        """Return the values of all ranks, in the order of the ranks.

        Raises:
            AgentEnvError: Another process failed, and told so with `settle`.
        """
        return self._exchange(list(values))

    def _exchange(self, mine: list[Any] | _Failed, limit_s: float | None = None) -> list[Any]:
        if self.size == 1:
            return [] if isinstance(mine, _Failed) else mine
        parts: list[Any] = [None] * self.size
        if limit_s is None:
            dist.all_gather_object(parts, mine, group=self.values)
        else:
            # Beside this thread, because the wait cannot be broken off.
            work = Thread(target=_gather_or_not, args=(parts, mine, self.values), daemon=True)
            work.start()
            work.join(limit_s)
            if any(part is None for part in parts):
                raise AgentEnvError(f"process {self.rank} failed alone, and the others wait for it: {mine}")
        for rank, part in enumerate(parts):
            if isinstance(part, _Failed) and rank != self.rank:
                raise AgentEnvError(f"another process failed: {part}")
        return [value for part in parts if not isinstance(part, _Failed) for value in part]


class _Failed(str):
    """What a process that failed tells the others, in the place of its values."""

    __slots__ = ()


def _gather_or_not(parts: list[Any], mine: Any, group: Any) -> None:
    with suppress(RuntimeError):  # a process has gone
        dist.all_gather_object(parts, mine, group=group)


def _buckets(grads: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return neighbours of one format together, because each message between ranks costs a fixed time."""
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for grad in grads:
        nbytes = grad.numel() * grad.itemsize
        if not buckets or buckets[-1][0].dtype != grad.dtype or size + nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(grad)
        size += nbytes
    return buckets


def _merged(name: str, values: Sequence[float]) -> float:
    means = [value for value in values if isinstance(value, Mean)]
    if means:
        return float(Mean.merge(means))
    spreads = [value for value in values if isinstance(value, Spread)]
    if spreads:
        return float(Spread.merge(spreads))
    if SUMMED.match(name):
        return sum(values)
    # A rank that counted nothing has NaN.
    known = [value for value in values if not isnan(value)] or values
    pick = EXTREMES.get(name.rpartition("/")[2])
    return sum(known) / len(known) if pick is None else pick(known)
