"""Attention of the live rows: which columns a token sees, and decoding without copies of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentenv.core.errors import UsageError
from agentenv.core.transformers_internals import attention_of, supports_sdpa

__all__ = [
    "apply_soft_cap",
    "attention_windows",
    "grouped_decode_attention",
    "masks",
    "use_grouped_attention",
]

ATTENTION_NAME = "agentenv_grouped"


def attention_windows(config: Any) -> dict[str, int | None]:
    """Return the kinds of attention masks that a text model needs, each with its window.

    Raises:
        UsageError: A layer has a state other than keys and values.
    """
    kinds: list[str] = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    unknown = [kind for kind in kinds if kind not in {"full_attention", "sliding_attention"}]
    if unknown or getattr(config, "is_encoder_decoder", False):
        what = ", ".join(unknown) or "an encoder"
        raise UsageError(
            f"the model type {config.model_type!r} has {what}, which the transformers engine cannot decode "
            "row by row",
            remedy="use vllm: or a vLLM server",
        )
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if "sliding_attention" in kinds:
        return {"full_attention": None, "sliding_attention": window}
    return {"all": None if kinds else window}


def masks(
    columns_BT: Tensor, width: int, windows: Mapping[str, int | None], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return additive masks `[B, 1, T, width]`, with which a token sees itself and the tokens before it.

    Args:
        columns_BT: the column of each token in its row.
        width: number of columns to attend over.
        windows: the window of each kind of mask.
        dtype: number format of the model.
    """
    distance = columns_BT[:, None, :, None] - torch.arange(width, device=columns_BT.device)
    made: dict[str, Tensor] = {}
    for name, window in windows.items():
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        made[name] = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        made[name].masked_fill_(~seen, torch.finfo(dtype).min)
    return made


def grouped_decode_attention(  # noqa: PLR0917 - transformers' signature
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for one query token per row, without repeating key-value heads.

    With a mask, transformers repeats the key-value heads for every decoded token, which copies the whole
    cache each time. With a single token, the query heads of one key-value head can take the place of query
    positions instead. Everything else goes to transformers' own sdpa function.

    Args:
        module: the attention layer.
        query: [B, query heads, T, D].
        key: [B, key-value heads, L, D].
        value: [B, key-value heads, L, D].
        attention_mask: [B, 1, T, L], additive or boolean.
        dropout: passed on to sdpa except when decoding.
        scaling: factor of the scores.
        kwargs: passed on to sdpa except when decoding.
    """
    rows, heads, tokens, size = query.shape
    grouped = tokens == 1 and not module.training and kwargs.get("position_bias") is None
    if not grouped or attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    folded = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    output = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, 1, heads, value.shape[-1]), None


def apply_soft_cap(model: PreTrainedModel) -> None:
    """Switch a model that caps its attention scores (Gemma 2) to an attention that applies the cap.

    Transformers loads such a model with sdpa, which takes the cap as an argument and ignores it.
    """
    text: Any = model.config.get_text_config()
    name = attention_of(text)
    # Eager, flash and flex attention apply the cap. Those built on sdpa, ours among them, do not.
    applied = name.startswith("eager") or "flash" in name or "flex" in name
    if getattr(text, "attn_logit_softcapping", None) is not None and not applied:
        model.set_attn_implementation("eager")


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch a model to the grouped attention, if it supports it.

    Eager attention is kept, because models choose it for features that sdpa lacks, such as the soft cap
    of Gemma 2.
    """
    apply_soft_cap(model)
    name = attention_of(model.config)
    if name and not name.startswith("eager") and supports_sdpa(model):
        AttentionInterface.register(ATTENTION_NAME, grouped_decode_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
        model.set_attn_implementation(ATTENTION_NAME)
