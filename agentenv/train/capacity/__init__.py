"""What a training would need on the devices of a machine, computed from the model's config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.train.capacity.dry_run import dry_run as dry_run
    from agentenv.train.capacity.machine import Machine as Machine
    from agentenv.train.capacity.needs import DryRuns as DryRuns
    from agentenv.train.capacity.placement import Placement as Placement
    from agentenv.train.capacity.placement import place as place
    from agentenv.train.capacity.report import CapacityPlan as CapacityPlan
    from agentenv.train.capacity.report import plan_capacity as plan_capacity
    from agentenv.train.capacity.shape import ModelShape as ModelShape
    from agentenv.train.capacity.shape import model_shape as model_shape
    from agentenv.train.capacity.shape import read_config as read_config

__all__ = door(
    __name__,
    {
        "dry_run": ["dry_run"],
        "machine": ["Machine"],
        "needs": ["DryRuns"],
        "placement": ["Placement", "place"],
        "report": ["CapacityPlan", "plan_capacity"],
        "shape": ["ModelShape", "model_shape", "read_config"],
    },
)
