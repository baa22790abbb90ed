"""Prefill of several rows as one packed row, so that nothing is computed for padding.

The new tokens of all rows stand one after the other in one row, and so pass the products of the weights
together. Only attention takes the rows apart: each has its own keys and values in the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentenv.engine.hf.buffers import RowBuffers, SavedRow

__all__ = ["PaddingCost", "Segment", "segment_attention", "segments_of"]

UNSUPPORTED = ("position_bias", "s_aux", "sliding_window", "softcap")
"""Arguments by which some models change attention, and which the attention of segments does not support."""
FLOPS = 9e10
"""Operations a second of one core, measured for float32."""
SEGMENT_S = 6e-5
"""Seconds that the attention of one more segment takes in each layer."""


class Segment(NamedTuple):
    """The new tokens of one row in a packed row."""

    start: int
    stop: int
    row: int
    """Row of the buffers that has the keys and values."""
    end: int
    """Number of columns that the row holds itself, with the new tokens."""
    shared: SavedRow | None
    """What the row begins with and does not hold itself."""
    mask: Tensor | None
    """Additive mask `[new tokens, all columns]`; None if all tokens are new, so that a causal mask does."""


def segments_of(
    buffers: RowBuffers, first: int, counts: Sequence[int], *, like: Tensor
) -> tuple[Segment, ...]:
    """Return the segments of rows that follow each other in the buffers.

    Args:
        buffers: the rows, before their new tokens are counted.
        first: the first row.
        counts: number of new tokens of each row.
        like: a tensor of the number format and the device of the masks.
    """
    segments: list[Segment] = []
    start, own = 0, buffers.own
    for row, count in enumerate(counts, start=first):
        mask, length = None, buffers.lengths[row]
        if length:
            hidden = like.new_full((count, length + count), torch.finfo(like.dtype).min)
            mask = hidden.triu_(length + 1)
        segments.append(Segment(start, start + count, row, own[row] + count, buffers.shared[row], mask))
        start += count
    return tuple(segments)


def segment_attention(
    query_1HTD: Tensor,
    key_RKCD: Tensor,
    value_RKCD: Tensor,
    segments: Sequence[Segment],
    *,
    layer: int,
    scale: float | None,
    options: dict[str, Any],
) -> Tensor:
    """Return `[1, T, H, D]`: the attention of each token to the earlier tokens of its row.

    Args:
        query_1HTD: queries of the packed row.
        key_RKCD: keys in the buffers.
        value_RKCD: values in the buffers.
        segments: the rows of the packed row.
        layer: index of the layer.
        scale: factor of the scores.
        options: further arguments that the model passes to its attention.

    Raises:
        ValueError: The model uses an option that this attention does not support.
    """
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(f"the model passes {name}, which the attention of segments does not support")
    heads = key_RKCD.shape[1]
    output_1THD = query_1HTD.new_empty(1, *query_1HTD.shape[2:0:-1], value_RKCD.shape[-1])
    # The query heads of one key-value head stand in a dimension of their own, so that keys need no copies.
    output = output_1THD[0].transpose(0, 1).unflatten(0, (heads, -1))
    query = query_1HTD[0].unflatten(0, (heads, -1))
    groups = query.shape[1]
    for start, stop, row, end, shared, mask in segments:
        parts = [key_RKCD[row, :, :end], value_RKCD[row, :, :end]]
        if shared is not None:
            beginnings = (shared.keys[layer], shared.values[layer])
            parts = [torch.cat(both, 1) for both in zip(beginnings, parts, strict=True)]
        key, value = (part.unsqueeze(1).expand(-1, groups, -1, -1) for part in parts)
        output[:, :, start:stop] = scaled_dot_product_attention(
            query[:, :, start:stop], key, value, attn_mask=mask, is_causal=mask is None, scale=scale
        )
    return output_1THD


class PaddingCost:
    """Judges whether padding costs more than the attention calls of a packed row.

    Args:
        model: the model.
        layers: number of its layers.
    """

    def __init__(self, model: Any, layers: int) -> None:
        ends = {id(module.weight) for module in _ends(model)}
        body = sum(weight.numel() for weight in model.parameters() if id(weight) not in ends)
        self._token_s = 2 * body / FLOPS
        self._segment_s = SEGMENT_S * layers

    def packing_pays(self, counts: Sequence[int]) -> bool:
        """Return whether rows of so many new tokens should be packed."""
        padding = len(counts) * max(counts) - sum(counts)
        return padding * self._token_s > len(counts) * self._segment_s


def _ends(model: Any) -> list[Any]:
    """Return the embeddings and the LM head, which do not multiply each prompt token."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [module for module in ends if getattr(module, "weight", None) is not None]
