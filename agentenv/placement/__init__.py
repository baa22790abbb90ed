"""What a training would need on the devices of a machine, computed from the model's config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.placement.dry_run import dry_run as dry_run
    from agentenv.placement.machine import Machine as Machine
    from agentenv.placement.machine import Speeds as Speeds
    from agentenv.placement.needs import DryRuns as DryRuns
    from agentenv.placement.placement import Placement as Placement
    from agentenv.placement.placement import place as place
    from agentenv.placement.report import CapacityPlan as CapacityPlan
    from agentenv.placement.report import plan_capacity as plan_capacity
    from agentenv.placement.shape import ModelShape as ModelShape
    from agentenv.placement.shape import model_shape as model_shape
    from agentenv.placement.shape import read_config as read_config

__all__ = door(__name__)
