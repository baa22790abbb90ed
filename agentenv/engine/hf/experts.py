"""Tell to which experts of a mixture the routers of a transformers model send the tokens.

The choices of a forward pass are written into the buffers beside the keys and values of the same tokens. So
whatever is kept, copied or dropped with them, such as the row of an episode or the common beginning of
prompts, has the choices with which it was computed.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from agentenv.core.errors import UsageError
from agentenv.core.routed_experts import RoutedExperts
from agentenv.core.transformers_internals import router_modules

__all__ = ["ExpertRecorder"]


class ExpertRecorder:
    """Records the choices of all routers in forward passes.

    Args:
        model: a causal language model.

    Raises:
        UsageError: The model has no routers, or their choices cannot be read.
    """

    def __init__(self, model: Any) -> None:
        found = router_modules(model.get_decoder() if hasattr(model, "get_decoder") else model)
        self._routers: list[nn.Module] = [] if found is None else list(found.modules.values())
        if not self._routers:
            raise UsageError(
                f"{type(model).__name__} has no routers whose choices of experts can be told",
                remedy="leave return_routed_experts out",
            )
        self._choices: list[torch.Tensor] = []
        self._num_experts = 0

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the pass that is made inside this context."""
        self._choices = [torch.empty(0)] * len(self._routers)
        hooks = [
            router.register_forward_hook(partial(self._keep, layer))
            for layer, router in enumerate(self._routers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _keep(self, layer: int, _: nn.Module, __: Any, output: Any) -> None:
        parts: tuple[torch.Tensor, ...] = output if isinstance(output, tuple) else ()
        choices = [one for one in parts if not one.is_floating_point()]
        if len(choices) == 1:
            self._choices[layer] = choices[0]
            # The logits of all experts are the widest of what a router returns.
            self._num_experts = max(one.shape[-1] for one in parts)

    def taken(self, batch: int, length: int) -> torch.Tensor:
        """Return the choices of the last pass, `[batch, 1, length, layers, choices]`.

        Raises:
            UsageError: A router returned no choices.
        """
        if any(choices.numel() % (batch * length) or not choices.numel() for choices in self._choices):
            raise UsageError(
                f"{type(self._routers[0]).__name__} does not return the experts that it chooses",
                remedy="leave return_routed_experts out",
            )
        stacked = torch.stack([choices.view(batch, length, -1) for choices in self._choices], dim=2)
        return stacked[:, None].to(torch.int16)

    def told(self, choices: torch.Tensor) -> RoutedExperts:
        """Return choices of shape [tokens, layers, choices] in the form of a completion."""
        plain = choices.to("cpu").numpy()
        return RoutedExperts.of(plain.astype("uint8" if self._num_experts <= 256 else "uint16"))
