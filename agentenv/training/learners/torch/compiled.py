"""Layers compiled by `torch.compile`, which joins the small operations between matrix products.

Only the passes of the trainer run compiled. An engine that samples from the same model has other shapes,
with keys and values that grow by each token. Attention over packs stays outside of what is compiled, because
it has a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["CompiledLayers"]

BACKEND = "inductor"
MOST_VERSIONS = 64
"""Most compiled versions of a layer. Layers of one kind share them; they differ by layout, number format and
whether there are gradients. Beyond the limit PyTorch runs layers as they are."""


class CompiledLayers:
    """The layers of a model, which run compiled in a training's passes.

    Args:
        layers: the repeated layers of the model.
    """

    def __init__(self, layers: list[Any]) -> None:
        from torch._dynamo import config

        config.recompile_limit = max(config.recompile_limit, MOST_VERSIONS)
        self.allowed = True
        """Whether layers run compiled at all; False once a check has found that they are not exact."""
        self._scoring = False
        for layer in layers:
            compiled = torch.compile(layer._call_impl, dynamic=True, backend=BACKEND)  # noqa: SLF001
            # Where `nn.Module.compile` puts it; a copy of the model does not have it.
            layer._compiled_call_impl = _Switch(self, compiled, layer._call_impl)  # noqa: SLF001

    @contextmanager
    def scoring(self) -> Generator[None]:
        """Run layers compiled in this context, also without gradients."""
        self._scoring = True
        try:
            yield
        finally:
            self._scoring = False

    @property
    def used(self) -> bool:
        """Whether a layer that is called now runs compiled.

        Layers that are computed again in the backward pass are called after the context, with gradients.
        """
        return self.allowed and (self._scoring or torch.is_grad_enabled())


class _Switch:
    """What is called in the place of a layer."""

    def __init__(
        self, owner: CompiledLayers, compiled: Callable[..., Any], plain: Callable[..., Any]
    ) -> None:
        self._owner, self._compiled, self._plain = owner, compiled, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._compiled if self._owner.used else self._plain)(*args, **kwargs)
