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
from agentenv.engine.hf.buffers import SavedRow
from agentenv.engine.hf.packed import Segment, segment_attention

__all__ = [
    "ATTENTION_NAME",
    "SharedColumns",
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
    shared: Sequence[SharedColumns] = (),
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
        shared: columns that come before those of several rows each.
        kwargs: passed on to sdpa except when decoding.
    """
    if segments is not None:
        layer: Any = module.layer_idx
        packed = segment_attention(query, key, value, segments, layer=layer, scale=scaling, options=kwargs)
        return packed, None
    rows, heads, tokens, _ = query.shape
    grouped = tokens == 1 and not module.training and kwargs.get("position_bias") is None
    if not grouped or attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    folded = query.reshape(rows, key.shape[1], heads // key.shape[1], query.shape[-1])
    output = folded.new_empty(*folded.shape[:3], value.shape[-1])
    weight = folded.new_empty(*folded.shape[:3], 1)
    classes = [(slice(None), key.shape[2])]
    if long_rows is not None:
        alone = [(slice(row, row + 1), length) for row, length in long_rows.lengths.items()]
        classes = [(slice(None), long_rows.others), *alone]
    for which, width in classes:
        parts = (folded[which], key[which, :, :width], value[which, :, :width])
        hidden = attention_mask[which, ..., :width]
        if shared:
            output[which], weight[which] = _weighed(*parts, hidden, scaling)
        else:
            output[which] = _folded(*parts, hidden, scaling)
    for one in shared:
        one.add(output, weight, folded, module.layer_idx, scaling)
    return output.reshape(rows, 1, heads, value.shape[-1]), None


class SharedColumns(NamedTuple):
    """Columns that come before those of several rows, which all attend to them in one product."""

    rows: torch.Tensor
    """The numbers of the rows."""
    columns: SavedRow

    def add(
        self, output: torch.Tensor, weight: torch.Tensor, query: torch.Tensor, layer: Any, scale: float | None
    ) -> None:
        """Add these columns to the attention over the others.

        Args:
            output: [B, H, G, D], the attention over the rows' own columns; changed in place.
            weight: [B, H, G, 1], the logarithm of the weight that these had together.
            query: [B, H, G, D], where G query heads have one key-value head.
            layer: index of the layer.
            scale: factor of the scores.
        """
        groups = query.shape[2]
        together = query[self.rows].transpose(0, 1).flatten(1, 2)[None]
        parts = (self.columns.keys[layer][None], self.columns.values[layer][None])
        further, its_weight = (
            part[0].unflatten(1, (-1, groups)).transpose(0, 1)
            for part in _weighed(together, *parts, None, scale)
        )
        share = (its_weight - weight[self.rows]).sigmoid_()
        output[self.rows] = output[self.rows].lerp_(further, share)


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


def _weighed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention over some columns, and the logarithm of the weight that they have together."""
    rows, heads, tokens, size = query.shape
    scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT).mul_(scale or size**-0.5)
    if mask is not None:
        scores.view(rows, heads, tokens, -1).add_(mask)
    largest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    output = torch.bmm(weights, value.flatten(0, 1)).div_(total)
    return output.view(rows, heads, tokens, -1), total.log_().add_(largest).view(rows, heads, tokens, 1)


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
