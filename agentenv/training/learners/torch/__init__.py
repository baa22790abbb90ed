"""The model in training: packed rows, attention, log-probabilities, adapters, optimiser and shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.training.learners.torch.optim import MasterOptimizer as MasterOptimizer
    from agentenv.training.learners.torch.packing import CostModel as CostModel
    from agentenv.training.learners.torch.packing import MicroBatch as MicroBatch
    from agentenv.training.learners.torch.packing import pack_rows as pack_rows
    from agentenv.training.learners.torch.policy import Policy as Policy
    from agentenv.training.learners.torch.policy import add_lora as add_lora
    from agentenv.training.learners.torch.reference import Reference as Reference
    from agentenv.training.learners.torch.world import World as World
    from agentenv.training.learners.torch.world import num_processes as num_processes

__all__ = door(__name__)
