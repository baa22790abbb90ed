"""Layers of a model that keep fewer activations for the backward pass, and compute the same numbers.

What a step keeps decides its memory. Without this, each layer keeps four tensors of the MLP's wide size, two
of which are products of the weights, and for each RMS norm its input and two more tensors of that size. With
it, only what takes a product of weights to compute is kept:

1. `silu(gate) * up` and the product with the down projection are one function, which keeps gate and up.
2. An RMS norm keeps its input. Whoever saves its output for the backward pass, such as the projections to
   queries, keeps a recipe, from which the output is computed again.

Nothing is approximated: the backward pass computes the same values again. A module is replaced only if its
own forward pass, tried on random numbers, returns exactly what the replacement returns.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu
from torch.utils.weak import WeakIdKeyDictionary

from agentenv.training.learners.torch.products import multiply, product, weight_gradient

__all__ = ["keep_less", "recipes"]

GATED = ("gate_proj", "up_proj", "down_proj")
"""Layers of a gated MLP, under the names that nearly all models of transformers use."""


def keep_less(model: nn.Module) -> None:
    """Let the gated MLPs and RMS norms of a model on the CPU keep less for the backward pass."""
    known: dict[tuple[type, type], bool] = {}
    for module in model.modules():
        kind = _replacement_of(module)
        if kind is None or "forward" in module.__dict__:
            continue
        pair = (type(module), kind)
        if pair not in known:
            known[pair] = _computes_the_same(module, kind)
        if known[pair]:
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
        return self.compute(inputs)

    def compute(self, inputs: Tensor) -> Tensor:
        weight, eps = self._norm.weight, self._norm.variance_epsilon
        output: Tensor = _Norm.apply(inputs, weight, eps)
        table = _current.get()
        if table is not None and torch.is_grad_enabled():
            table.add(output, _Recipe(inputs, weight, eps))
        return output


class _GatedForward:
    """The forward pass of a gated MLP."""

    def __init__(self, mlp: Any) -> None:
        self._mlp = mlp

    def __call__(self, inputs: Tensor) -> Tensor:
        own = _is_product(self._mlp.down_proj)
        grad = torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        if not own or not grad:
            return type(self._mlp).forward(self._mlp, inputs)
        return self.compute(inputs)

    def compute(self, inputs: Tensor) -> Tensor:
        mlp = self._mlp
        return _GatedDown.apply(mlp.gate_proj(inputs), mlp.up_proj(inputs), mlp.down_proj.weight)


_Kind: TypeAlias = type[_NormForward] | type[_GatedForward]


def _replacement_of(module: nn.Module) -> _Kind | None:
    """Return what could replace the forward pass of a module, judged by the module's parts."""
    weights = dict(module.named_parameters(recurse=False))
    if "norm" in type(module).__name__.lower():
        fits = list(weights) == ["weight"] and hasattr(module, "variance_epsilon")
        return _NormForward if fits and _is_real(weights["weight"]) else None
    layers: list[Any] = [getattr(module, name, None) for name in GATED]
    return _GatedForward if all(map(_is_product, layers)) and _is_real(layers[0].weight) else None


def _is_product(layer: Any) -> bool:
    """Return whether a layer only multiplies with its weight."""
    return type(layer) is nn.Linear and getattr(layer, "bias", None) is None


def _is_real(weight: Tensor) -> bool:
    # A dry run says what a GPU would hold, where nothing is replaced.
    return weight.device.type == "cpu" and not isinstance(weight, FakeTensor)


@torch.no_grad()
def _computes_the_same(module: Any, kind: _Kind) -> bool:
    """Compare a module with its replacement on random numbers."""
    generator = torch.Generator().manual_seed(0)
    if kind is _NormForward:
        # Weights of 1, as norms have at first, would hide what the norm does with them.
        module = copy.deepcopy(module)
        module.weight.copy_(torch.randn(module.weight.shape, generator=generator))
    weight: Tensor = module.weight if kind is _NormForward else module.gate_proj.weight
    inputs = torch.randn(1, 3, weight.shape[-1], generator=generator).to(weight.dtype)
    try:
        return torch.equal(type(module).forward(module, inputs), kind(module).compute(inputs))
    except (AttributeError, RuntimeError, TypeError):
        return False  # a class that has the same names for other things


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
