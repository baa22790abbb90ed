"""Advantages, token weights and losses of GRPO and related methods, as pure functions of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.training.objective.advantage import group_advantages as group_advantages
    from agentenv.training.objective.advantage import overlong_penalty as overlong_penalty
    from agentenv.training.objective.advantage import turn_advantages as turn_advantages
    from agentenv.training.objective.advantage import turn_returns as turn_returns
    from agentenv.training.objective.loss import LossInputs as LossInputs
    from agentenv.training.objective.loss import LossOutput as LossOutput
    from agentenv.training.objective.loss import grpo_loss as grpo_loss
    from agentenv.training.objective.loss import kl_penalty as kl_penalty
    from agentenv.training.objective.weighting import correction_weights as correction_weights
    from agentenv.training.objective.weighting import off_policy_mask as off_policy_mask
    from agentenv.training.objective.weighting import token_weights as token_weights

__all__ = door(__name__)
