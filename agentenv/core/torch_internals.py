"""Names of torch that are no part of its public interface, and what is done where one of them is missing.

They were read in torch 2.13. No other module uses such names. A test takes each of them away, and checks
what takes its place.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = [
    "allow_compiled_versions",
    "attention_gradients",
    "attention_with_sums",
    "first_row",
    "gloo_group",
    "has_attention_with_sums",
    "nccl_group",
]

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
ATTENTION_BACKWARD = f"{ATTENTION}_backward"
GLOO_OPTIONS, TIMEOUT = "_Options", "_timeout"


def has_attention_with_sums() -> bool:
    """Return whether torch offers the kernels of `attention_with_sums`."""
    return hasattr(torch.ops.aten, ATTENTION) and hasattr(torch.ops.aten, ATTENTION_BACKWARD)


def attention_with_sums(
    given: tuple[Tensor, ...], *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the result of attention, `[B, H, T, D]`, and the log-sum-exp of its scores, `[B, H, T]`.

    On the CPU `scaled_dot_product_attention` computes with this kernel, and does not return the log-sum-exp.

    Args:
        given: query, key and value.
        causal: whether a query sees only the keys up to its own.
        scale: factor of the scores; None means one divided by the square root of D.
    """
    return getattr(torch.ops.aten, ATTENTION)(*given, 0.0, causal, scale=scale)


def attention_gradients(
    grad: Tensor, saved: tuple[Tensor, ...], *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of `attention_with_sums`.

    Args:
        grad: gradient of the output.
        saved: query, key, value, output and log-sum-exp.
        causal: as in the forward pass.
        scale: as in the forward pass.
    """
    return getattr(torch.ops.aten, ATTENTION_BACKWARD)(grad, *saved, 0.0, causal, scale=scale)


def allow_compiled_versions(most: int) -> None:
    """Let `torch.compile` keep at least so many versions of a function; without the name torch decides."""
    with suppress(ImportError, AttributeError):
        from torch._dynamo import config

        config.recompile_limit = max(config.recompile_limit, most)


def first_row(tensor: Tensor) -> int:
    """Return the row of a tensor with which this process's part of it begins; 0 if it is not sharded."""
    return tensor.__create_chunk_list__()[0].offsets[0] if isinstance(tensor, DTensor) else 0


def nccl_group(store: Any, rank: int, size: int, *, limit: timedelta) -> Any:
    """Return a process group of GPUs; without the name of the limit, NCCL keeps its own."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - builds for the CPU do not have it
    options = nccl.Options()
    if hasattr(options, TIMEOUT):
        setattr(options, TIMEOUT, limit)
    return nccl(store, rank, size, options)


def gloo_group(store: Any, rank: int, size: int, *, address: str, limit: timedelta) -> Any:
    """Return a process group of CPUs that listens at an address of this machine.

    Without the options gloo chooses the address, which `GLOO_SOCKET_IFNAME` decides.
    """
    gloo: Any = dist.ProcessGroupGloo
    if not hasattr(gloo, GLOO_OPTIONS):
        return gloo(store, rank, size, limit)
    options = getattr(gloo, GLOO_OPTIONS)()
    setattr(options, TIMEOUT, limit)
    options._devices = [gloo.create_device(hostname=address)]  # noqa: SLF001
    return gloo(store, rank, size, options)
