"""Weights that are spread over the ranks (FSDP2), brought together and spread again.

Gathering is done by all ranks at once, one tensor after the other in the same order, so that no rank ever
holds more than its own part and one whole tensor; the first rank keeps the whole ones in main memory.
Spreading asks nobody: every rank takes its part of a tensor that it has whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentenv.train.model.adapters import adapter_of

__all__ = ["like", "take_whole_weights", "whole", "whole_tree", "whole_weights"]


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor whole, on this rank's device; all ranks call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_tree(tree: Any, *, keep: bool) -> Any:
    """Return nested dicts and lists with whole tensors in main memory, or None where they are not kept."""
    if isinstance(tree, Tensor):
        full = whole(tree.detach())
        return full.cpu() if keep else None
    if isinstance(tree, Mapping):
        return {name: whole_tree(one, keep=keep) for name, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [whole_tree(one, keep=keep) for one in tree]
    return tree


def whole_weights(model: Any, *, keep: bool) -> dict[str, Tensor]:
    """Return a model's weights as `whole_tree` does, tied ones as one tensor; of adapters only theirs."""
    adapters = adapter_of(model) is not None
    held: dict[int, Any] = {}
    found: dict[str, Tensor] = {}
    for name, one in model.state_dict(keep_vars=True).items():
        if adapters and not one.requires_grad and "lora_" not in name:
            continue
        if id(one) not in held:
            held[id(one)] = whole_tree(one, keep=keep)
        found[name] = held[id(one)]
    return found


def like(tensor: Tensor, spread: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, spread as another one is; as it is if that is whole."""
    if not isinstance(spread, DTensor) or isinstance(tensor, DTensor) or tensor.shape != spread.shape:
        return tensor
    replica = DTensor.from_local(tensor.to(spread.device), spread.device_mesh, run_check=False)
    return replica.redistribute(placements=spread.placements)


def take_whole_weights(model: Any) -> None:
    """Let `load_state_dict` of a model that is spread over the ranks take whole weights."""

    def spread(module: Any, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, one in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = like(state[prefix + name], one)

    model.register_load_state_dict_pre_hook(torch.no_grad()(spread))
