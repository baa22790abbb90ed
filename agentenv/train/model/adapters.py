"""Whether a model has LoRA adapters, and what can be done with them: the only place that asks peft's names.

A model of peft is a wrapper around its base; one without adapters is the base itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

__all__ = ["AdaptedModel", "adapted", "adapter_of", "adapter_ranks", "base_of"]


class AdaptedModel(Protocol):
    """What the trainer uses of a model with adapters."""

    active_adapter: str
    peft_config: Mapping[str, Any]

    def get_base_model(self) -> Any:
        """Return the model below the adapters."""
        ...

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Compute as the base model does."""
        ...

    def set_adapter(self, adapter_name: str) -> None:
        """Switch to an adapter."""
        ...

    def add_adapter(self, adapter_name: str, peft_config: Any) -> None:
        """Add a fresh adapter."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Return all parameters, those of the base included."""
        ...

    def parameters(self) -> Iterator[Any]:
        """Return all parameters, those of the base included."""
        ...


def adapted(model: Any) -> AdaptedModel | None:
    """Return the model as one with adapters; None if it has none."""
    return cast("AdaptedModel", model) if hasattr(model, "peft_config") else None


def adapter_of(model: Any) -> str | None:
    """Return the name of the adapter in use; None if the model has none."""
    found = adapted(model)
    return None if found is None else found.active_adapter


def adapter_ranks(model: Any) -> list[int]:
    """Return the rank of each adapter of a model."""
    found = adapted(model)
    return [] if found is None else [config.r for config in found.peft_config.values()]


def base_of(model: Any) -> Any:
    """Return the model below its adapters; the model itself if it has none."""
    found = adapted(model)
    return model if found is None else found.get_base_model()
