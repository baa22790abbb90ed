"""Faster matrix products for the forward passes of the engine, on processors where oneDNN beats MKL.

1. In float32 every product of some size runs through oneDNN, at no cost.
2. Decoding multiplies few rows with every matrix, so that reading the matrix takes most of the time. oneDNN
   reads it faster from a copy in a layout of its own ("packed"). Packing takes about as long as the packed
   products save in `BREAK_EVEN` decoding passes, and needs memory for the copy. It is done once it seems to
   pay, so that a short rollout is not slower.
3. A packed copy is used as long as its weight is unchanged, and is forgotten after an update.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentenv.core.processor import prefers_onednn
from agentenv.core.torch_internals import has_onednn, onednn_linear, packed_for_onednn, version_of

__all__ = ["BREAK_EVEN", "Products"]

BREAK_EVEN = {torch.float32: 16, torch.bfloat16: 20}
"""Decoding passes whose savings pay for packing. For SmolLM2 on an idle machine, 11 to 25 were measured in
float32 with 8 rows, and in bfloat16 11 to 13 with 8 rows, 14 to 20 with one and 15 to 28 with 32."""
SMALLEST = {torch.float32: 2_000_000, torch.bfloat16: 500_000}
"""Multiplications from which oneDNN's operator is used, a call of which costs about 10 µs more."""
PACKED_FOR = 16
"""Number of rows for which oneDNN chooses the layout; it serves other numbers nearly as well."""
ALIASED = 1024
"""Columns of a float32 matrix are slow to read if they are a multiple of so many numbers apart."""


class Products:
    """The linear layers of a model, and the packed copies of their weights."""

    # Invariant: a layer outside `on()` is as the engine found it, because the trainer may share the model.

    def __init__(self, model: nn.Module) -> None:
        self._layers = _layers(model)
        self._packed = False
        self._passes = 0
        self._passes_before = 0
        """Decoding passes with the weights before the last update."""

    @contextmanager
    def on(self) -> Generator[None]:
        """Let forward passes of this thread use the faster products."""
        for layer in self._layers:
            layer.install()
        try:
            yield
        finally:
            for layer in self._layers:
                layer.restore()

    def expect(self, passes: int) -> None:
        """Pack the weights if it pays; to be called before each decoding pass.

        Args:
            passes: most decoding passes that the live rows still need.
        """
        self._passes += 1
        if self._packed or not self._layers or not self._pays(passes):
            return
        self._packed = True  # also if there is no room now, so that the next pass need not look again
        if free_memory() >= 2 * sum(layer.nbytes for layer in self._layers):
            for layer in self._layers:
                layer.pack()

    def forget(self) -> None:
        """Free the packed copies, because the weights changed or nobody needs them."""
        for layer in self._layers:
            layer.packed = None
        self._packed = False
        if self._passes:
            self._passes_before, self._passes = self._passes, 0

    def _pays(self, passes: int) -> bool:
        """Return whether packing is likely to pay, judged by the number of decoding passes.

        It pays if this rollout becomes as long as the last one. Otherwise the passes so far must have paid
        for it, and the live rows must be able to go on for twice as many. After four times as many passes
        it is done in any case: by then it costs three per cent of the rollout at most.
        """
        even = BREAK_EVEN[self._layers[0].dtype]
        like_before = self._passes_before - self._passes >= 2 * even
        goes_on = self._passes > even and passes >= 2 * even
        return like_before or goes_on or self._passes >= 4 * even


class _Layer:
    """One linear layer."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = module
        self.dtype = module.weight.dtype
        self.packed: Tensor | None = None
        self._source: tuple[int, int | None] = (0, 0)
        """Address and version of the weight that was packed."""
        self._forward: _Forward | None = None

    @property
    def nbytes(self) -> int:
        """Size of the packed copy, which is 0 for a layer that packing would not make faster."""
        return self._module.weight.nbytes if self._packing_helps else 0

    @property
    def _packing_helps(self) -> bool:
        weight = self._module.weight
        # A float32 matrix that is stored input-major is read as fast as a packed one; see
        # `lay_out_for_few_rows`.
        input_major = self.dtype == torch.float32 and weight.t().is_contiguous()
        return not input_major or weight.shape[0] % ALIASED == 0

    @torch.no_grad()
    def pack(self) -> None:
        """Make a packed copy of the weight."""
        if not self._packing_helps:
            return
        weight = self._module.weight.detach()
        self._source = (weight.data_ptr(), version_of(self._module.weight))
        self.packed = None if self._source[1] is None else packed_for_onednn(weight, PACKED_FOR)

    def install(self) -> None:
        """Replace the forward pass of the layer."""
        attributes = self._module.__dict__
        current: Any = attributes.get("forward")
        # Another engine of the same model may be inside its `on()`; its replacement is not what to restore.
        before = current.before if isinstance(current, _Forward) else current
        if self._forward is None or self._forward.before is not before:
            self._forward = _Forward(self, before)
        attributes["forward"] = self._forward

    def restore(self) -> None:
        """Undo `install`, unless another engine has replaced the forward pass meanwhile."""
        attributes = self._module.__dict__
        if self._forward is None or attributes.get("forward") is not self._forward:
            return
        if self._forward.before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = self._forward.before

    def product(self, inputs: Tensor) -> Tensor | None:
        """Return the output of the layer, or None if the plain forward pass should compute it."""
        weight: Tensor = self._module.weight
        # Another thread may train the model meanwhile, and oneDNN's operator has no gradient.
        if (
            torch.is_grad_enabled()
            or not inputs.dtype == weight.dtype == self.dtype
            or inputs.numel() * weight.shape[0] < SMALLEST[self.dtype]
            or torch.is_autocast_enabled("cpu")
        ):
            return None
        packed = self.packed
        if packed is not None and self._source == (weight.data_ptr(), version_of(weight)):
            return onednn_linear(inputs, packed, self._module.bias)
        return onednn_linear(inputs, weight, self._module.bias) if self.dtype == torch.float32 else None

    def plain(self, inputs: Tensor) -> Tensor:
        """Return the output of the layer as its class computes it."""
        return nn.Linear.forward(self._module, inputs)


class _Forward:
    """The forward pass of a layer during a pass of the engine."""

    def __init__(self, layer: _Layer, before: Callable[[Tensor], Tensor] | None) -> None:
        self._layer = layer
        self.before = before
        """What replaced the layer's own forward pass before, such as the trainer's products."""

    def __call__(self, inputs: Tensor) -> Tensor:
        output = self._layer.product(inputs)
        return (self.before or self._layer.plain)(inputs) if output is None else output


def _layers(model: nn.Module) -> list[_Layer]:
    """Return the layers whose products oneDNN computes faster; none on other processors and devices."""
    if not prefers_onednn() or not has_onednn():
        return []
    linear = (module for module in model.modules() if type(module) is nn.Linear)
    kinds = (module for module in linear if module.weight.device.type == "cpu")
    return [_Layer(module) for module in kinds if module.weight.dtype in BREAK_EVEN]


SYSTEM = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Return the bytes that are free: of the system, or of this process's control group if those are fewer.

    Where neither is known, the answer is 0 on Linux, and elsewhere a number that no model reaches.
    """
    if not sys.platform.startswith("linux"):
        return sys.maxsize
    free = 0
    with suppress(OSError, ValueError):
        for line in SYSTEM.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):  # the file says `max` where the group has no limit
        limit = int((GROUP / "memory.max").read_text())
        free = min(free, limit - int((GROUP / "memory.current").read_text()))
    return max(free, 0)
