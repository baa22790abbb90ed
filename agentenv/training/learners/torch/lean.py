"""Layers of a model on the CPU that keep fewer activations and multiply faster, and compute the same numbers.

What a step keeps decides its memory. Without this, each layer keeps four tensors of the MLP's wide size, two
of which are products of the weights, and for each RMS norm its input and two more tensors of that size. With
it, only what takes a product of weights to compute is kept:

1. `silu(gate) * up` and the product with the down projection are one function, which keeps gate and up.
2. An RMS norm keeps its input. Whoever saves its output for the backward pass, such as the projections to
   queries, keeps a recipe, from which the output is computed again.

Nothing is approximated: the backward pass computes the same values again. A module is replaced only if its
class has exactly one of the forward passes written below, which nearly all models of transformers share. What
a module is called, or what it returns for a few numbers, says too little: a gated norm takes a second
argument, and an MLP whose weights are zero returns the same with any activation.

torch multiplies float32 matrices with MKL and offers oneDNN, which it also contains, through an operator
without gradients. `faster_linear` gives a model's linear layers a forward pass that uses this operator on
processors where it is faster, also for the gradients. The numbers differ from MKL's by the rounding of
another order of sums.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear, silu
from torch.utils.weak import WeakIdKeyDictionary

from agentenv.core.processor import prefers_onednn
from agentenv.core.torch_internals import has_onednn, is_fake, onednn_linear

__all__ = [
    "add_product",
    "faster_linear",
    "keep_less",
    "multiply",
    "product",
    "product_into",
    "recipes",
    "weight_gradient",
]

RMS_NORM = """
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)
"""
"""The forward pass of 130 norms of transformers 5.19, among them those of Llama, Qwen, Mistral and Phi."""
GATED_MLPS = [
    """
def forward(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj
""",
    """
def forward(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
""",
    """
def forward(self, hidden_state):
    return self.down_proj(self.act_fn(self.gate_proj(hidden_state)) * self.up_proj(hidden_state))
""",
]
"""The forward passes of 131 gated MLPs of transformers 5.19."""
SILUS = {"torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation"}
"""Activations that are silu."""


def keep_less(model: nn.Module) -> None:
    """Let the gated MLPs and RMS norms of a model on the CPU keep less for the backward pass."""
    for module in model.modules():
        kind = None if "forward" in module.__dict__ else _replacement_of(module)
        if kind is not None:
            setattr(module, "forward", kind(module))  # noqa: B010 - a type checker refuses the assignment


@contextmanager
def recipes() -> Generator[None]:
    """Keep recipes for the outputs of norms that are saved for the backward pass inside this context."""
    table = _Recipes()
    token = _current.set(table)
    try:
        with saved_tensors_hooks(table.pack, table.unpack):
            yield
    finally:
        _current.reset(token)


class _Recipe:
    """How to compute the output of a norm again."""

    def __init__(self, inputs: Tensor, weight: Tensor, eps: float) -> None:
        self._inputs, self._weight, self._eps = inputs.detach(), weight.detach(), eps

    def cook(self) -> Tensor:
        with torch.no_grad():
            return _normed(self._inputs, self._weight, self._eps)


class _Recipes:
    """The recipes of one forward pass."""

    # Invariant: an entry of `_known` lives as long as the storage of the output that it was made for. So
    # it is found for no other storage, and holds no input longer than needed: a recipe that was packed is
    # held by those who saved the output, and a layer that is checkpointed packs none.

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._last: tuple[_Recipe, Tensor] | None = None
        """The output that was computed last: several layers in a row need the same one."""

    def add(self, output: Tensor, recipe: _Recipe) -> None:
        self._known[output.untyped_storage()] = (recipe, output.shape)

    def pack(self, saved: Tensor) -> Tensor | _Recipe:
        if saved.layout != torch.strided:
            return saved
        entry: tuple[_Recipe, torch.Size] | None = self._known.get(saved.untyped_storage())
        if entry is not None and saved.shape == entry[1] and saved.is_contiguous():
            return entry[0]
        # A function that saves its own output, as `exp` does, would hold itself and never be freed.
        return saved if saved.grad_fn is None else saved.detach()

    def unpack(self, kept: Tensor | _Recipe) -> Tensor:
        if not isinstance(kept, _Recipe):
            return kept
        if self._last is None or self._last[0] is not kept:
            self._last = None  # frees the memory of the old one before the new one is made
            self._last = (kept, kept.cook())
        return self._last[1]


_current: ContextVar[_Recipes | None] = ContextVar("recipes", default=None)
"""The recipes of the forward pass that this thread is making."""


class _NormForward:
    """The forward pass of an RMS norm; an object, so that a copy of the norm gets a copy of its own."""

    def __init__(self, norm: Any) -> None:
        self._norm = norm

    def __call__(self, inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return type(self._norm).forward(self._norm, inputs)
        weight, eps = self._norm.weight, self._norm.variance_epsilon
        output: Tensor = _Norm.apply(inputs, weight, eps)
        table = _current.get()
        if table is not None:
            table.add(output, _Recipe(inputs, weight, eps))
        return output


class _GatedForward:
    """The forward pass of a gated MLP."""

    def __init__(self, mlp: Any) -> None:
        self._mlp = mlp

    def __call__(self, inputs: Tensor) -> Tensor:
        mlp = self._mlp
        grad = torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        # Adapters may have taken the layer's place since.
        if not grad or not _is_product(mlp.down_proj):
            return type(mlp).forward(mlp, inputs)
        return _GatedDown.apply(mlp.gate_proj(inputs), mlp.up_proj(inputs), mlp.down_proj.weight)


def _replacement_of(module: Any) -> type[_NormForward | _GatedForward] | None:
    """Return what computes the same as the forward pass of a module; None if nothing is known to."""
    written = _written(type(module))
    weights = dict(module.named_parameters(recurse=False))
    if written == _normal(RMS_NORM):
        return _NormForward if list(weights) == ["weight"] and _is_real(weights["weight"]) else None
    if written not in map(_normal, GATED_MLPS):
        return None
    layers = (module.gate_proj, module.up_proj, module.down_proj)
    activation = f"{type(module.act_fn).__module__}.{type(module.act_fn).__qualname__}"
    fits = not weights and all(map(_is_product, layers)) and activation in SILUS
    return _GatedForward if fits and _is_real(layers[0].weight) else None


@cache
def _written(kind: type) -> str:
    """Return the code of a class's forward pass as `_normal` writes it; empty if it cannot be read."""
    forward: Any = getattr(kind, "forward", None)
    if not inspect.isfunction(forward) or hasattr(forward, "__wrapped__"):
        return ""
    try:
        return _normal(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):
        return ""


@cache
def _normal(source: str) -> str:
    """Return the code of a function without comments, annotations and docstring; empty if it is decorated."""
    function = ast.parse(source).body[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return ""
    function.returns = None
    for argument in function.args.args:
        argument.annotation = None
    if ast.get_docstring(function) is not None:
        del function.body[0]
    return ast.unparse(function)


def _is_product(layer: Any) -> bool:
    """Return whether a layer only multiplies with its weight."""
    return type(layer) is nn.Linear and getattr(layer, "bias", None) is None


def _is_real(weight: Tensor) -> bool:
    # A dry run says what a GPU would hold, where nothing is replaced.
    return weight.device.type == "cpu" and not is_fake(weight)


def _normed(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = inputs.to(torch.float32)
    unit = wide.pow(2)
    scale = torch.rsqrt(unit.mean(-1, keepdim=True) + eps)
    # Computed in place, because what is allocated and freed between kept tensors leaves gaps in the memory.
    normed = torch.mul(wide, scale, out=unit).to(inputs.dtype)
    return normed.mul_(weight) if weight.dtype == normed.dtype else weight * normed


class _Norm(torch.autograd.Function):  # pyright: ignore[reportUntypedBaseClass]
    """An RMS norm that keeps its input only."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.eps = eps
        return _normed(inputs, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        wide = inputs.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + ctx.eps)
        unit = wide * scale
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grads[0] * unit.to(inputs.dtype)).flatten(0, -2).sum(0)
        grad_unit = (grads[0] * weight).to(torch.float32)
        along = (grad_unit * unit).mean(-1, keepdim=True)
        return (scale * (grad_unit - unit * along)).to(inputs.dtype), grad_weight, None


class _GatedDown(torch.autograd.Function):  # pyright: ignore[reportUntypedBaseClass]
    """`silu(gate) * up`, multiplied with the weight of the down projection; it keeps gate and up only."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return multiply(silu(gate).mul_(up), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        activated = silu(gate)
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_NM, hidden_NK = grads[0].flatten(0, -2), (activated * up).flatten(0, -2)
            grad_weight = weight_gradient(grad_NM, hidden_NK, weight)
        grad_hidden = product(grads[0], weight.T)
        grad_gate = torch.ops.aten.silu_backward(grad_hidden * up, gate)
        return grad_gate, grad_hidden * activated, grad_weight


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
