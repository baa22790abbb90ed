"""Names of peft that are no part of its public interface, and what is done where one of them is missing.

They were read in peft 0.21. No other module uses such names.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["with_adapter"]

DISABLED = "_disable_adapters"
ACTIVE = "_active_adapter"


@contextmanager
def with_adapter(layers: Sequence[Any], name: str | None) -> Generator[None]:
    """Let layers compute with one adapter, or with none, and restore what they computed with before.

    The public setters also change `requires_grad`, which belongs to the trainer. Without the private names
    they are used, and `requires_grad` is restored, too; a training in another thread would see it change.

    Args:
        layers: the layers that have adapters.
        name: the adapter; None for the base model.
    """
    if not all(hasattr(layer, DISABLED) and hasattr(layer, ACTIVE) for layer in layers):
        with _publicly(layers, name):
            yield
        return
    before = [(layer, getattr(layer, DISABLED), getattr(layer, ACTIVE)) for layer in layers]
    for layer in layers:
        setattr(layer, DISABLED, name is None)
        if name is not None:
            setattr(layer, ACTIVE, [name])
    try:
        yield
    finally:
        for layer, disabled, active in before:
            setattr(layer, DISABLED, disabled)
            setattr(layer, ACTIVE, active)


@contextmanager
def _publicly(layers: Sequence[Any], name: str | None) -> Generator[None]:
    before = [(layer, layer.disable_adapters, list(layer.active_adapters)) for layer in layers]
    trained = [(one, one.requires_grad) for layer in layers for one in layer.parameters()]
    for layer in layers:
        layer.enable_adapters(name is not None)
        if name is not None:
            layer.set_adapter(name)
    try:
        yield
    finally:
        for layer, disabled, active in before:
            layer.set_adapter(active)
            layer.enable_adapters(not disabled)
        for one, requires_grad in trained:
            one.requires_grad_(requires_grad)
