"""Names of transformers that are no part of its public interface, and what is done where one is missing.

They were read in transformers 5.19. No other module uses such names. A test takes each of them away, and
checks what takes its place. Nothing is imported here: the models and configs are given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = [
    "RouterModules",
    "attention_of",
    "ignored_weights",
    "keeps_float32",
    "router_modules",
    "split_layers",
    "supports_sdpa",
]

ATTENTION = "_attn_implementation"
SDPA = "_supports_sdpa"
RECORDERS = "_can_record_outputs"
LAYERS = "_no_split_modules"
KEPT_WIDE = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
CHECKPOINTED = "transformers.modeling_layers.GradientCheckpointingLayer"
IGNORED = "_keys_to_ignore_on_load_unexpected"


def attention_of(config: Any) -> str:
    """Return the name of a model's attention; empty if it is not said.

    Attention that is not known is left as it is: it is neither packed nor replaced.
    """
    return getattr(config, ATTENTION, None) or ""


def supports_sdpa(model: Any) -> bool:
    """Return whether a model's layers take the attention of torch; False if it is not said."""
    return bool(getattr(model, SDPA, False))


class RouterModules(NamedTuple):
    """The routers of a mixture of experts."""

    modules: dict[str, Any]
    """The routers by their names, in the order of the layers."""
    logits_at: int
    """Index of the logits in what a router returns."""


def router_modules(decoder: Any) -> RouterModules | None:
    """Return the routers of a model's body; None if it does not say which they are, or has none."""
    recorder = (getattr(decoder, RECORDERS, None) or {}).get("router_logits")
    kind, part = getattr(recorder, "target_class", None), getattr(recorder, "layer_name", None)
    if recorder is None or kind is None:
        return None
    modules = {
        name: module
        for name, module in decoder.named_modules()
        if isinstance(module, kind) and (part is None or part in name)
    }
    return RouterModules(modules, recorder.index) if modules else None


def split_layers(model: Any) -> list[Any]:
    """Return the layers that are sharded one by one.

    Where the model does not name their classes, they are those that can be checkpointed.
    """
    if not hasattr(model, LAYERS):
        return [module for module in model.modules() if CHECKPOINTED in map(_name, type(module).__mro__)]
    names: Iterable[str] = getattr(model, LAYERS) or ()
    # Sharding puts FSDP before the names of the classes.
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def keeps_float32(model: Any) -> bool | None:
    """Return whether some weights stay in float32 in a model of low precision; None if it is not said."""
    if not all(hasattr(model, name) for name in KEPT_WIDE):
        return None
    return any(getattr(model, name) for name in KEPT_WIDE)


def ignored_weights(model: Any) -> list[str]:
    """Return patterns of the names of weights that the files may hold and the model does not have."""
    return list(getattr(model, IGNORED, None) or ())
