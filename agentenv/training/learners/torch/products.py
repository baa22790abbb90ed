"""Float32 matrix products through oneDNN, on processors where it is faster than torch's own library.

torch multiplies float32 matrices with MKL and offers oneDNN, which it also contains, through an operator
without gradients. `faster_linear` gives a model's linear layers a forward pass that uses this operator, also
for the gradients. The numbers differ from MKL's by the rounding of another order of sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from agentenv.core.processor import prefers_onednn
from agentenv.core.torch_internals import has_onednn, is_fake, onednn_linear

__all__ = ["add_product", "faster_linear", "multiply", "product", "product_into", "weight_gradient"]

SMALLEST = 2_000_000
"""Multiplications from which oneDNN is used. A call costs about 10 µs more than MKL's; with 0.6 to 2 million
multiplications, both took the same time."""
BLOCK = 8192
"""Most rows or columns of a result that are computed at once, which bounds the memory for copies."""


def product(left_NK: Tensor, right_MK: Tensor) -> Tensor:
    """Return `left @ right.T`, `[N, M]`; the right matrix may be a transposed view."""
    # oneDNN's operator has no gradient, which a backward pass that is differentiated again would need.
    if _is_faster(left_NK, right_MK) and not torch.is_grad_enabled():
        return onednn_linear(left_NK, right_MK)
    return left_NK @ right_MK.T


def product_into(out_NM: Tensor, left_NK: Tensor, right_MK: Tensor) -> None:
    """Overwrite `out` with `left @ right.T`, without gradients."""
    if _is_faster(left_NK, right_MK):
        # oneDNN's operator cannot write into a tensor, and a block of its output stays in the cache.
        for out_NB, right_BK in zip(out_NM.split(BLOCK, 1), right_MK.split(BLOCK), strict=True):
            out_NB.copy_(onednn_linear(left_NK, right_BK))
    else:
        torch.mm(left_NK, right_MK.T, out=out_NM)


def add_product(out_NM: Tensor, left_NK: Tensor, right_MK: Tensor) -> None:
    """Add `left @ right.T` to `out`, without gradients."""
    if _is_faster(left_NK, right_MK):
        for out_BM, left_BK in zip(out_NM.split(BLOCK), left_NK.split(BLOCK), strict=True):
            out_BM.add_(onednn_linear(left_BK, right_MK))
    else:
        out_NM.addmm_(left_NK, right_MK.T)


def multiply(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return what a linear layer without a bias returns, without gradients."""
    return onednn_linear(inputs, weight) if _is_faster(inputs, weight) else linear(inputs, weight)


def faster_linear(model: nn.Module) -> None:
    """Let the float32 layers of a model on the CPU multiply through oneDNN, where that is faster."""
    if not prefers_onednn() or not has_onednn():
        return
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in module.__dict__:
            setattr(module, "forward", _Forward(module))  # noqa: B010 - a type checker refuses the assignment


class _Forward:
    """The forward pass of one layer; an object, so that a copy of the layer gets a copy of its own."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, inputs: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        if not _is_faster(inputs, weight) or torch.is_autocast_enabled("cpu"):
            return linear(inputs, weight, bias)
        if torch.is_grad_enabled():
            return _Product.apply(inputs, weight, bias)
        return onednn_linear(inputs, weight, bias)


class _Product(torch.autograd.Function):  # pyright: ignore[reportUntypedBaseClass]
    """A linear layer whose three products run through oneDNN."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return onednn_linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        need_inputs, need_weight, need_bias = ctx.needs_input_grad
        grad_NM = grads[0].flatten(0, -2)
        grad_inputs = product(grads[0], weight.T) if need_inputs else None
        grad_weight = None
        if need_weight:
            grad_weight = weight_gradient(grad_NM, inputs.flatten(0, -2), weight)
        return grad_inputs, grad_weight, grad_NM.sum(0) if need_bias else None


def weight_gradient(grad_NM: Tensor, inputs_NK: Tensor, weight_MK: Tensor) -> Tensor:
    """Return the gradient in the memory layout of the weight, so that autograd need not copy it."""
    if weight_MK.is_contiguous():
        return product(grad_NM.T, inputs_NK.T)
    return product(inputs_NK.T, grad_NM.T).T


def _is_faster(left: Tensor, right: Tensor) -> bool:
    return (
        prefers_onednn()
        and left.numel() * right.shape[0] >= SMALLEST
        and left.dtype == right.dtype == torch.float32
        and left.device.type == "cpu"
        and has_onednn()
        and not is_fake(left)  # a dry run says what a GPU would hold
    )
