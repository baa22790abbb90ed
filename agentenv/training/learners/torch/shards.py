"""Gather weights that are sharded over the ranks (FSDP2), shard whole weights again, and compare replicas.

All ranks gather together, one tensor after the other in the same order, so that no device ever holds more
than its own shards and one whole tensor. The first rank keeps the whole tensors in main memory. Sharding
needs no communication: every rank takes its part of a tensor that it has whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentenv.training.learners.torch.adapters import adapter_of

__all__ = [
    "as_forward",
    "checksum",
    "copy_from_first",
    "like",
    "local",
    "reshard",
    "stand_in",
    "take_whole_weights",
    "whole",
    "whole_weights",
]

T = TypeVar("T")


def as_forward(model: Any, compute: Callable[..., T]) -> Callable[..., T]:
    """Return a function that computes as a forward pass of a sharded model.

    While it runs, the parameters outside the layers (embeddings, last norm and LM head) are whole. They are
    gathered when it begins, and again for its backward pass.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    name = "_agentenv_forward"
    # FSDP makes parameters whole around methods of a model that it knows by name, not around functions.
    setattr(model, name, compute)
    register_fsdp_forward_method(model, name)
    return getattr(model, name)


def reshard(model: Any) -> None:
    """Shard all layers again, some of which a broken-off pass left whole; other models are unchanged."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; a tensor that is not sharded is returned itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stand_in(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the same shape and shards that carries a gradient and has no memory of its own."""
    part = local(tensor.detach())
    # One number that is expanded to the shape: a gradient must fit the shape, and needs no weights.
    empty = torch.zeros((), dtype=dtype, device=part.device).expand(part.shape)
    if isinstance(tensor, DTensor):
        where = (tensor.device_mesh, tensor.placements)
        empty = DTensor.from_local(empty, *where, run_check=False, shape=tensor.shape, stride=tensor.stride())
    return empty.requires_grad_()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on this rank's device. All ranks must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_weights(model: Any, *, keep: bool) -> dict[str, Tensor]:
    """Return a model's whole weights in main memory, or None for each if `keep` is False.

    Tied weights are one tensor. Of a model with adapters these are only the weights of the adapters.
    """
    adapters = adapter_of(model) is not None
    gathered: dict[int, Any] = {}
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if adapters and not value.requires_grad and "lora_" not in name:
            continue
        # By identity, because tied weights have several names, and gathering costs a message of their size.
        if id(value) not in gathered:
            full = whole(value.detach())
            gathered[id(value)] = full.cpu() if keep else None
        weights[name] = gathered[id(value)]
    return weights


def like(tensor: Tensor, spread: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, sharded like `spread`; unchanged if `spread` is whole."""
    if not isinstance(spread, DTensor) or isinstance(tensor, DTensor) or tensor.shape != spread.shape:
        return tensor
    replica = DTensor.from_local(tensor.to(spread.device), spread.device_mesh, run_check=False)
    return replica.redistribute(placements=spread.placements)


def take_whole_weights(model: Any) -> None:
    """Make `load_state_dict` of a sharded model accept whole weights."""

    def spread(module: Any, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = like(state[prefix + name], parameter)

    model.register_load_state_dict_pre_hook(torch.no_grad()(spread))


def checksum(tensor: Tensor) -> int:
    """Return the sum of a tensor's values, read as integers; it does not depend on the order of the sum."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integers.get(tensor.dtype.itemsize)
    plain = tensor.detach() if kind is None else tensor.detach().view(kind)
    return int(plain.sum(dtype=torch.int64))


@torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
def copy_from_first(tensor: Tensor) -> None:
    """Overwrite a tensor with that of the first rank. All ranks must call this together."""
    # As bytes, which every backend sends, and in one piece, because matrices may be stored input-major.
    data = tensor.detach().reshape(-1).contiguous()
    dist.broadcast(data.view(torch.uint8), 0)
    tensor.detach().copy_(data.view(tensor.shape))
