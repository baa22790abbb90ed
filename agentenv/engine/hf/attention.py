"""Attention for decoding that treats the query heads of one key-value head as query rows.

Transformers repeats the key-value heads of grouped-query attention for every decoded token, which
copies the whole cache each time. With a single query token, the group of query heads can take the place
of query positions, so that the cache is read without a copy. A packed row is taken apart into its rows, and
all other prefill and training go to transformers' own sdpa function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentenv.core.transformers_internals import attention_of, supports_sdpa
from agentenv.engine.hf.packed import Segment, segment_attention

__all__ = [
    "ATTENTION_NAME",
    "apply_soft_cap",
    "grouped_decode_attention",
    "long_rows",
    "use_grouped_attention",
]

ATTENTION_NAME = "agentenv_grouped"
ROW_COLUMNS = 300
"""Columns of a row whose attention takes as long as the calls for a row by itself (SmolLM2, one thread)."""


def grouped_decode_attention(  # noqa: PLR0917 - transformers' signature
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    segments: Sequence[Segment] | None = None,
    long_rows: LongRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for one query token per row, without repeating key-value heads.

    Args:
        module: the attention layer.
        query: [B, query heads, T, D].
        key: [B, key-value heads, L, D].
        value: [B, key-value heads, L, D].
        attention_mask: [B, 1, T, L], additive or boolean.
        dropout: passed on to sdpa except when decoding.
        scaling: factor of the scores.
        segments: the rows of a packed row, whose keys and values are those of all rows in the buffers.
        long_rows: rows that are much longer than the others, which are attended to by themselves.
        kwargs: passed on to sdpa except when decoding.
    """
    if segments is not None:
        return segment_attention(query, key, value, segments, scale=scaling, options=kwargs), None
    rows, heads, tokens, _ = query.shape
    grouped = tokens == 1 and not module.training and kwargs.get("position_bias") is None
    if not grouped or attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    folded = query.reshape(rows, key.shape[1], heads // key.shape[1], query.shape[-1])
    if long_rows is None:
        output = _folded(folded, key, value, attention_mask, scaling)
    else:
        width = long_rows.others
        output = _folded(folded, key[:, :, :width], value[:, :, :width], attention_mask[..., :width], scaling)
        for row, length in long_rows.lengths.items():
            one, seen = slice(row, row + 1), slice(length)
            parts = (key[one, :, seen], value[one, :, seen], attention_mask[one, ..., seen])
            output[one] = _folded(folded[one], *parts, scaling)
    return output.reshape(rows, 1, heads, value.shape[-1]), None


class LongRows(NamedTuple):
    """Which rows of a pass are much longer than the others."""

    others: int
    """Columns of the longest of the others."""
    lengths: dict[int, int]
    """Columns of each long row, by its number."""


def long_rows(lengths: Sequence[int]) -> LongRows | None:
    """Return the rows to attend to by themselves, so that the others are not as wide; None if there is none.

    Args:
        lengths: number of columns of each row.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    least, count, alone = len(lengths) * lengths[order[0]], 0, 0
    for index, row in enumerate(order[:-1], start=1):
        alone += lengths[row] + ROW_COLUMNS
        if (work := alone + len(lengths) * lengths[order[index]]) < least:
            least, count = work, index
    if not count:
        return None
    return LongRows(lengths[order[count]], {row: lengths[row] for row in sorted(order[:count])})


def _folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    if len(query) > 1 and key.device.type == "cpu" and key.dtype == mask.dtype == torch.float32:
        return _by_products(query, key, value, mask, scaling or query.shape[-1] ** -0.5)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute attention as two matrix products; with few queries sdpa's blocks are slower on the CPU.

    In bfloat16 the scores between the products would be rounded, which sdpa's are not.
    """
    rows, heads, tokens, _ = query.shape
    scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT).mul_(scale)
    scores.view(rows, heads, tokens, -1).add_(mask)
    return torch.bmm(scores.softmax(-1), value.flatten(0, 1)).view(rows, heads, tokens, -1)


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


def use_grouped_attention(model: PreTrainedModel) -> bool:
    """Switch a model to the grouped attention; return False if the model does not support it.

    Eager attention is kept, because models choose it for features that sdpa lacks, such as the soft cap
    of Gemma 2.
    """
    apply_soft_cap(model)
    name = attention_of(model.config)
    if not name or name.startswith("eager") or not supports_sdpa(model):
        return False
    AttentionInterface.register(ATTENTION_NAME, grouped_decode_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    model.set_attn_implementation(ATTENTION_NAME)
    return True
