"""The memory that a plan counts for a training on GPUs, beside the most that the first one held."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from agentenv.core.errors import AgentEnvError

if TYPE_CHECKING:
    from agentenv.training.request import TrainPlan

__all__ = ["MemoryBeside", "device_bytes"]

log = logging.getLogger(__name__)
CONTEXT = 8192
"""Tokens of the longest episode where `limits.max_context_tokens` says nothing, as in `agentenv plan`."""


def device_bytes() -> int | None:
    """Return the memory of the GPU that trains; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


class MemoryBeside:
    """Says what a plan counts when a training starts, and after its first step what the device held.

    Args:
        total: returns the memory of the device that trains; None if there is nothing to count.
    """

    def __init__(self, total: Callable[[], int | None] = device_bytes) -> None:
        self._total = total
        self._counted = 0.0

    def begin(self, plan: TrainPlan) -> dict[str, float]:
        """Return the metric that stands beside those of the first step; empty if nothing is counted."""
        total = self._total()
        if total is None or plan.config.device == "cpu":
            return {}
        from agentenv.placement import Trained, model_sizes, read_config
        from agentenv.training.learners.torch.world import num_processes

        try:
            sizes = model_sizes(read_config(plan.config.model.removeprefix("hf:")))
        except AgentEnvError as error:  # such as a model that is one file, which says its sizes otherwise
            log.info("the memory of this training is not counted: %s", error.message)
            return {}
        context = plan.limits.max_context_tokens or CONTEXT
        shards = plan.config.shard_size(num_processes())
        self._counted = Trained(sizes, plan.config, context).trainer(shards, total).total / 1e9
        log.warning("the plan counts %.1f GB on each device that trains", self._counted)
        return {"memory/planned_gb": self._counted}

    def step(self, metrics: Mapping[str, float]) -> None:
        """Say after the first step what the device held at most."""
        held = metrics.get("memory/held_gb/max")
        if held is not None and self._counted:
            log.warning("the first step held at most %.1f GB; the plan counted %.1f", held, self._counted)
            self._counted = 0.0
