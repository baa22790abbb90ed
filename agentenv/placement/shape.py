"""The sizes of a model, from its config alone."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agentenv.core.errors import ModelNotFound, UsageError
from agentenv.core.faults import first_line_of
from agentenv.core.transformers_internals import split_layers
from agentenv.render.vision.rules import FAMILIES

__all__ = ["ModelShape", "empty_model", "model_shape", "read_config", "shortened"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a causal language model."""

    parameters: int
    active: int
    """Number of parameters that compute a token: without the experts that it is not sent to."""
    layers: int
    layer_kinds: int
    """Number of different kinds of layers; 1 if all are equal."""
    head: int
    """Number of parameters of the LM head."""
    root: int
    """Number of parameters outside the layers, which a sharded pass gathers once."""
    largest_layer: int
    """Number of parameters of the largest layer, which a sharded pass gathers at once."""
    vocab_size: int
    attention_width: int
    """Number of query heads times their size."""
    cache_values: int
    """Number of values that a token keeps in the KV cache."""


def read_config(model: str) -> Any:
    """Return the transformers config of a directory, a packaged model or a Hub id; no weights are read.

    Raises:
        ModelNotFound: There is no such config.
        UsageError: The model is a .gguf file.
    """
    from transformers import AutoConfig

    from agentenv.engine.hf.load import directory_of

    if model.endswith(".gguf"):
        raise UsageError(
            f"the sizes of {model} cannot be read from a .gguf file",
            remedy="name the directory or the Hub id of the original model, of which only the config is read",
        )
    path = directory_of(model, "config.json")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - a file that somebody else wrote can lead to any exception
        raise ModelNotFound(f"the config of {model} cannot be read: {first_line_of(error)}") from None


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """Return a model of the config on the meta device, whose tensors have shapes and no memory.

    Raises:
        UsageError: The config is not that of a causal language model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return auto.from_config(copy.deepcopy(config), dtype=dtype).eval()
    except ValueError as error:
        raise UsageError(
            f"{type(config).__name__} is not the config of a causal language model: {error}"
        ) from None


def model_shape(config: Any) -> ModelShape:
    """Return the sizes of a model from its config."""
    model = empty_model(config, torch.bfloat16)
    text = config.get_text_config()
    language = set(model.get_decoder().modules())
    layers = [layer for layer in split_layers(model) if layer in language]  # those of a tower keep no cache
    sizes = [_size(layer) for layer in layers]
    kinds = list(zip(sizes, getattr(text, "layer_types", None) or sizes, strict=True))
    total = _size(model)
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelShape(
        parameters=total,
        active=total - _idle_experts(model, text),
        layers=len(layers),
        layer_kinds=len(set(kinds)),
        head=model.get_output_embeddings().weight.numel(),
        root=total - sum(sizes),
        largest_layer=max(sizes),
        vocab_size=text.vocab_size,
        attention_width=heads * width,
        cache_values=_cache_values(text, width, len(layers)),
    )


def shortened(config: Any, layers: int) -> Any:
    """Return a config with fewer layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _idle_experts(model: nn.Module, text: Any) -> int:
    """Return the number of parameters of the experts that a token is not sent to."""
    used = getattr(text, "num_experts_per_tok", None)
    experts = [one for name, one in model.named_parameters() if ".experts." in name and one.dim() == 3]
    return 0 if used is None else sum(math.prod(one.shape[1:]) * (len(one) - used) for one in experts)


def _cache_values(text: Any, width: int, layers: int) -> int:
    """Return how many values a token keeps in the KV cache. Windows of attention are not counted as less."""
    if getattr(text, "kv_lora_rank", None):  # latent attention keeps one compressed vector
        return layers * (text.kv_lora_rank + text.qk_rope_head_dim)
    kinds = getattr(text, "layer_types", None)
    if kinds:
        layers = sum(kind in ("full_attention", "sliding_attention") for kind in kinds)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return 2 * layers * heads * width
