"""Layers that are computed again in the backward pass, so that a pass keeps their inputs only.

They are computed in evaluation mode, whereas the checkpoints of transformers want training mode, in which
layers have dropout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

__all__ = ["recompute"]


def recompute(layers: Iterable[Any]) -> None:
    """Let these layers of a model be computed again in the backward pass."""
    for layer in layers:
        layer.forward = _Recomputed(layer.forward)


class _Recomputed:
    """The forward pass of a layer."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        # Nothing in a layer is random in evaluation mode, so the generators' states need not be kept.
        return checkpoint(self._plain, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the forward pass of the copied layer as it was; who copied the model decides how it runs."""
        return copy.deepcopy(self._plain, memo)
