"""Attention over a prefix tree of rows, which computes shared tokens once and needs no mask.

Tokens are in depth-first order, so the descendants of a node are the tokens right after it. A token attends
causally to its own node and fully to each node above it. Both are plain attention on slices. The partial
results of a token are merged by their log-sum-exp, as FlashAttention does with its blocks of keys (Dao and
others, 2022). One sequence with a block mask would also compute the pairs that the mask hides: three quarters
of all pairs for eight completions of 256 tokens after a prompt of 512.

The two kernels are those of PyTorch's `scaled_dot_product_attention` on the CPU, called by name because
only they return the log-sum-exp. `pack_attention` says what other devices take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from agentenv.core.torch_internals import attention_gradients, attention_with_sums

__all__ = ["BLOCK", "Node", "Way", "tree_attention"]

Way = Literal["tree", "flex"]
"""How attention over a pack is computed; see `pack_attention`."""

BLOCK = 128
"""Number of queries, and of keys, that flex attention computes or leaves out together."""


class Node(NamedTuple):
    """Adjacent tokens of a pack that belong to the same rows."""

    start: int
    stop: int
    end: int
    """The node's descendants are the tokens from `stop` to `end`."""


def tree_attention(
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    nodes: Sequence[Node],
    *,
    scale: float | None = None,
) -> Tensor:
    """Return `[1, T, H, D]`: each token's attention to its own past and to the nodes above it.

    Args:
        query_1HTD: queries of all tokens, with H heads.
        key_1KTD: keys with K heads, each of which serves H / K query heads.
        value_1KTD: values with K heads.
        nodes: nodes of the tree; each token is in exactly one of them.
        scale: factor of the scores; None means one divided by the square root of D.
    """
    return _TreeAttention.apply(query_1HTD, key_1KTD, value_1KTD, nodes, scale)


class _TreeAttention(torch.autograd.Function):  # pyright: ignore[reportUntypedBaseClass]
    """Two kernel calls per node in each pass; only inputs, output and log-sum-exp are kept.

    The backward pass of each part uses the log-sum-exp over all parts of a token. Its probabilities are then
    correct within each part, so a part's backward pass needs nothing from the other parts.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, nodes: Sequence[Node], scale: float | None
    ) -> Tensor:
        output = _empty_like_tokens(query)
        lse = query.new_empty(
            query.shape[:3], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32
        )
        shared = [_repeat(one, query) for one in (key, value)]

        def of_part(rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
            given = (query[:, :, rows], *(one[:, :, columns] for one in shared))
            return attention_with_sums(given, causal=rows == columns, scale=scale)

        for start, stop, _ in nodes:
            own = slice(start, stop)
            output[:, :, own], lse[:, :, own] = of_part(own, own)
        for start, stop, end in nodes:
            if end > stop:
                below = slice(stop, end)
                _merge(output[:, :, below], lse[:, :, below], *of_part(below, slice(start, stop)))
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.settings = (nodes, scale)
        return output.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, lse = ctx.saved_tensors
        nodes, scale = ctx.settings
        grad_output = grads[0].transpose(1, 2)
        shared = [_repeat(one, query) for one in (key, value)]
        grad_query, grad_key, grad_value = found = [_empty_like_tokens(query) for _ in range(3)]

        def of_part(rows: slice, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
            own = (query[:, :, rows], *(one[:, :, columns] for one in shared))
            saved = (*own, output[:, :, rows], lse[:, :, rows])
            grad = grad_output[:, :, rows]
            return attention_gradients(grad, saved, causal=rows == columns, scale=scale)

        for start, stop, _ in nodes:
            own = slice(start, stop)
            for whole, part in zip(found, of_part(own, own), strict=True):
                whole[:, :, own] = part
        for start, stop, end in nodes:
            if end > stop:
                own, below = slice(start, stop), slice(stop, end)
                parts = of_part(below, own)
                grad_query[:, :, below] += parts[0]
                grad_key[:, :, own] += parts[1]
                grad_value[:, :, own] += parts[2]
        return grad_query, _unrepeat(grad_key, key), _unrepeat(grad_value, value), None, None


def _merge(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into the output and log-sum-exp of the tokens so far."""
    total = torch.logaddexp(lse, part_lse)
    output.mul_((lse - total).exp_().unsqueeze(-1)).add_(part * (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _repeat(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat the key or value heads, so that each query head has its own."""
    repeats = query.shape[1] // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def _unrepeat(grad: Tensor, tensor: Tensor) -> Tensor:
    """Sum the gradients of all query heads that one key or value head serves."""
    heads = tensor.shape[1]
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _empty_like_tokens(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape in which the heads of a token are adjacent in memory."""
    batch, heads, tokens, size = tensor.shape
    return tensor.new_empty(batch, tokens, heads, size).transpose(1, 2)
