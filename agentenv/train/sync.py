"""Weights from the trainer to what samples.

The in-process engine shares the model: nothing is copied, its caches are dropped. An engine with a
model of its own gets the parameters copied while it is held still.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from agentenv.engine.base import Engine
    from agentenv.train.grpo import GRPOTrainer

__all__ = ["held_still", "sampling_engine", "shares_model", "sync_engine"]


def sampling_engine(trainer: GRPOTrainer) -> Engine:
    """Return the engine that plays; made on the trainer's own weights if none was given."""
    if trainer.engine is None:
        from agentenv.engine.transformers_engine import TransformersEngine

        engine = TransformersEngine(trainer.model, name=f"hf:{trainer.model_name}", seed=trainer.config.seed)
        engine.weights_updated(trainer.weights_version)
        trainer.engine = engine
    return trainer.engine


def shares_model(trainer: GRPOTrainer) -> bool:
    """Return whether the engine samples from the very model in training."""
    return trainer.engine is not None and getattr(trainer.engine, "model", None) is trainer.model


@contextmanager
def held_still(trainer: GRPOTrainer) -> Generator[None]:
    """Let no request run through weights that are half old and half new."""
    if not shares_model(trainer):
        yield
        return
    engine: Any = trainer.engine
    with engine.updating():
        yield
    engine.weights_updated(trainer.weights_version)


@torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
def sync_engine(trainer: GRPOTrainer) -> None:
    """Bring the new weights to an engine that has a model of its own."""
    if trainer.engine is None or shares_model(trainer):
        return
    engine: Any = trainer.engine
    with engine.updating():
        held = dict(engine.model.state_dict(keep_vars=True))
        for name, value in trainer.model.state_dict(keep_vars=True).items():
            held[name].copy_(value)
    engine.weights_updated(trainer.weights_version)
