"""The parts of the training loop: playing, weight updates of the engine, evaluation and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.training.loop.checkpoint import load_checkpoint as load_checkpoint
    from agentenv.training.loop.checkpoint import save_checkpoint as save_checkpoint
    from agentenv.training.loop.checkpoint import save_tokenizer as save_tokenizer
    from agentenv.training.loop.directories import last_checkpoint as last_checkpoint
    from agentenv.training.loop.mixture import Mixture as Mixture
    from agentenv.training.loop.rollouts import EpisodeBatch as EpisodeBatch
    from agentenv.training.loop.rollouts import Rollouts as Rollouts
    from agentenv.training.loop.sft import DemonstrationPolicy as DemonstrationPolicy
    from agentenv.training.loop.sft import demonstrate as demonstrate

__all__ = door(__name__)
