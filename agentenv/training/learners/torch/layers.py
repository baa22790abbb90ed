"""How the repeated layers of a model run in a training: compiled, or computed again in the backward pass.

1. `torch.compile` joins the small operations between matrix products. Only the passes of the trainer run
   compiled. An engine that samples from the same model has other shapes, with keys and values that grow by
   each token. Attention over packs stays outside of what is compiled, because it has a kernel of its own.
2. A layer with a checkpoint keeps its inputs only. It is computed again in the backward pass, in evaluation
   mode, whereas the checkpoints of transformers want training mode, in which layers have dropout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from agentenv.core.torch_internals import allow_compiled_versions

__all__ = ["Layers"]

BACKEND = "inductor"
MOST_VERSIONS = 64
"""Most compiled versions of a layer. Layers of one kind share them; they differ by layout, number format and
whether there are gradients. Beyond the limit PyTorch runs layers as they are."""


class Layers:
    """The repeated layers of a model.

    Args:
        layers: the layers.
        compiled: whether they run compiled in a training's passes.
        checkpointed: whether they are computed again in the backward pass.
    """

    def __init__(self, layers: Sequence[Any], *, compiled: bool, checkpointed: bool) -> None:
        self.allowed = compiled
        """Whether layers run compiled at all; False once a check has found that they are not exact."""
        self.checkpointed = checkpointed
        self._scoring = False
        if compiled:
            allow_compiled_versions(MOST_VERSIONS)
        for layer in layers if compiled or checkpointed else ():
            plain = layer.forward
            call = torch.compile(plain, dynamic=True, backend=BACKEND) if compiled else plain
            layer.forward = _Run(self, call, plain)

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


class _Run:
    """The forward pass of a layer."""

    def __init__(self, owner: Layers, compiled: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self._owner, self._compiled, self._plain = owner, compiled, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._owner.checkpointed and torch.is_grad_enabled()):
            return self._run(*args, **kwargs)
        # Nothing in a layer is random in evaluation mode, so the generators' states need not be kept.
        return checkpoint(self._run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return (self._compiled if self._owner.used else self._plain)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the forward pass of the copied layer as it was; who copied the model decides how it runs."""
        return copy.deepcopy(self._plain, memo)
