"""Weights from the trainer to what samples.

The in-process engine shares the model: nothing is copied, its caches are dropped. An engine with a
model of its own gets the parameters copied while it is held still.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["copy_weights", "shares_model"]


def shares_model(engine: Any, model: Any) -> bool:
    """Return whether an engine samples from this very model."""
    return getattr(engine, "model", None) is model


@torch.no_grad()
def copy_weights(model: Any, engine: Any, version: int) -> None:
    """Copy parameters and buffers into the model of an in-process engine."""
    with engine.updating():
        held = dict(engine.model.state_dict(keep_vars=True))
        for name, value in model.state_dict(keep_vars=True).items():
            held[name].copy_(value)
    engine.weights_updated(version)
