"""The loop around the trainer: play, step, sync, evaluate, save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.train.loop.checkpoint import load_checkpoint as load_checkpoint
    from agentenv.train.loop.checkpoint import save_checkpoint as save_checkpoint
    from agentenv.train.loop.rollouts import Rollouts as Rollouts
    from agentenv.train.loop.sft import DemonstrationPolicy as DemonstrationPolicy
    from agentenv.train.loop.sft import demonstrate as demonstrate

__all__ = door(
    __name__,
    {
        "checkpoint": ["load_checkpoint", "save_checkpoint"],
        "rollouts": ["Rollouts"],
        "sft": ["DemonstrationPolicy", "demonstrate"],
    },
)
