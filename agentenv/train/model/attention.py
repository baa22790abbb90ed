"""Attention over a prefix tree of rows: the work of every shared token is done once, nothing is masked.

Tokens lie in depth-first order, so the descendants of a node are the tokens right after it. A token
attends to its own node causally and to each node above it in full. Both are plain attention on slices;
the parts of a token are added up by their log-sum-exp, as FlashAttention does with its blocks of keys
(Dao and others, 2022). Against one sequence with a block mask this saves the pairs that do not see each
other: of eight completions of 256 tokens after a prompt of 512, three quarters of all pairs.

The two kernels are those of PyTorch's `scaled_dot_product_attention` on the CPU, called by name because
only they return the log-sum-exp. Other devices take the block mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Node", "block_mask", "enable_tree_attention", "tree_attention"]

SUFFIX = "+tree"

UNSUPPORTED = ("position_bias", "s_aux", "sliding_window", "softcap")
"""Arguments with which some models change what attention computes."""


class Node(NamedTuple):
    """Tokens that the same rows begin with."""

    start: int
    stop: int
    end: int
    """Its descendants are the tokens from `stop` to here."""


def block_mask(nodes: Sequence[Node]) -> Tensor:
    """Return `[T, T]`, true where a query (row) sees a key (column)."""
    size = max(node.stop for node in nodes)
    keep_TT = torch.zeros(size, size, dtype=torch.bool)
    for start, stop, end in nodes:
        own = stop - start
        keep_TT[start:stop, start:stop] = torch.ones(own, own, dtype=torch.bool).tril()
        keep_TT[stop:end, start:stop] = True
    return keep_TT


def enable_tree_attention(model: Any) -> None:
    """Let a model's forward take `tree=nodes`; without it everything stays as it was.

    Args:
        model: of transformers, with any attention function of its interface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name: str = model.config._attn_implementation  # noqa: SLF001 - transformers has no public getter
    if name.endswith(SUFFIX):
        return
    inner = ALL_ATTENTION_FUNCTIONS[name]
    AttentionInterface.register(name + SUFFIX, partial(_forward, inner))
    AttentionMaskInterface.register(name + SUFFIX, ALL_MASK_ATTENTION_FUNCTIONS[name])
    model.set_attn_implementation(name + SUFFIX)


def _forward(  # noqa: PLR0917 - transformers' signature
    inner: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: Sequence[Node] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers asks: heads in the second dimension, results with heads in the third."""
    if tree is None:
        return inner(module, query, key, value, attention_mask, **options)
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(f"{type(module).__name__} wants {name}, which attention over a tree lacks")
    return tree_attention(query, key, value, tree, scale=options.get("scaling")), None


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
        query_1HTD: of all tokens, H heads.
        key_1KTD: K heads, of which each serves H / K query heads.
        value_1KTD: K heads.
        nodes: of the tree; each token is in exactly one.
        scale: of the scores; one by the root of D if not given.
    """
    return _TreeAttention.apply(query_1HTD, key_1KTD, value_1KTD, nodes, scale)


class _TreeAttention(torch.autograd.Function):  # pyright: ignore[reportUntypedBaseClass]
    """Two kernel calls a node, forward and backward; only inputs, output and log-sum-exp are kept.

    With the log-sum-exp of all its parts a token's probabilities in each part are right as they are, so
    each part's backward pass needs nothing of the other parts.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, nodes: Sequence[Node], scale: float | None
    ) -> Tensor:
        output = _empty_like_tokens(query)
        lse = query.new_empty(query.shape[:3], dtype=_accumulator(query))
        shared = [_repeat(one, query) for one in (key, value)]

        def of_part(rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
            given = (query[:, :, rows], *(one[:, :, columns] for one in shared))
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
                *given, 0.0, rows == columns, scale=scale
            )

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

        def of_part(rows: slice, columns: slice) -> list[Tensor]:
            given = (
                *(one[:, :, rows] for one in (grad_output, query)),
                *(one[:, :, columns] for one in shared),
            )
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001
                *given, output[:, :, rows], lse[:, :, rows], 0.0, rows == columns, scale=scale
            )

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
    """Add a part to what the tokens have attended to so far."""
    total = torch.logaddexp(lse, part_lse)
    output.mul_((lse - total).exp_().unsqueeze(-1)).add_(part * (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _repeat(tensor: Tensor, query: Tensor) -> Tensor:
    """Give each query head the key or value head that serves it."""
    repeats = query.shape[1] // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def _unrepeat(grad: Tensor, tensor: Tensor) -> Tensor:
    """Add up the gradients of the query heads that one key or value head serves."""
    heads = tensor.shape[1]
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _empty_like_tokens(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape whose memory has the heads of a token side by side."""
    batch, heads, tokens, size = tensor.shape
    return tensor.new_empty(batch, tokens, heads, size).transpose(1, 2)


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
