"""Access to a model's LoRA adapters; no other module depends on the names of peft's attributes.

A peft model is a wrapper around its base model. A model without adapters is the base model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor

__all__ = [
    "SAME_NATS",
    "AdaptedModel",
    "adapted",
    "adapter_of",
    "adapter_ranks",
    "base_changing",
    "base_of",
    "probe",
]

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of peft's `init_lora_weights` that move a part of the base model into the new adapter."""

SAME_NATS = 1e-3
"""Largest difference of log-probabilities of one policy that one machine computes twice."""


class AdaptedModel(Protocol):
    """The methods of a model with adapters that the trainer uses."""

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
    wrapper = adapted(model)
    return None if wrapper is None else wrapper.active_adapter


def adapter_ranks(model: Any) -> list[int]:
    """Return the rank of each adapter of a model."""
    wrapper = adapted(model)
    return [] if wrapper is None else [config.r for config in wrapper.peft_config.values()]


def base_of(model: Any) -> Any:
    """Return the model below its adapters; the model itself if it has none."""
    wrapper = adapted(model)
    return model if wrapper is None else wrapper.get_base_model()


def base_changing(model: Any) -> str:
    """Return the initialisation of the adapter in use if it has changed the base model; else empty text."""
    wrapper = adapted(model)
    if wrapper is None:
        return ""
    kind = str(getattr(wrapper.peft_config[wrapper.active_adapter], "init_lora_weights", ""))
    return kind if kind.startswith(_CHANGES_BASE) else ""


@torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
def probe(model: Any) -> Tensor:
    """Return log-probabilities of a few rows, `[N]`, which tell whether two models are the same policy."""
    model.eval()
    known = base_of(model).get_input_embeddings().weight.shape[0]
    vocabulary = min(known, 256)  # without the special tokens of images
    ids_BT = torch.randint(vocabulary, (3, 16), generator=torch.Generator().manual_seed(0))
    ids_BT = ids_BT.to(next(model.parameters()).device)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    return logits_BTV.float().log_softmax(-1).gather(-1, ids_BT[:, 1:, None]).flatten()
