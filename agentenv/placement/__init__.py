"""What a training would need on the devices of a machine, computed from the model's config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.placement.division import CapacityPlan as CapacityPlan
    from agentenv.placement.division import Machine as Machine
    from agentenv.placement.division import Placement as Placement
    from agentenv.placement.division import plan_capacity as plan_capacity
    from agentenv.placement.needs import Needs as Needs
    from agentenv.placement.needs import Trained as Trained
    from agentenv.placement.sizes import ModelSizes as ModelSizes
    from agentenv.placement.sizes import model_sizes as model_sizes
    from agentenv.placement.sizes import read_config as read_config

__all__ = door(__name__)
