"""What holds the weights in training: `torch` trains them on this machine's CPUs and GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.training.learners import torch as torch
    from agentenv.training.learners.learner import BringsWeights as BringsWeights
    from agentenv.training.learners.learner import KeepsFiles as KeepsFiles
    from agentenv.training.learners.learner import Learner as Learner
    from agentenv.training.learners.learner import LossFn as LossFn
    from agentenv.training.learners.learner import ScoresRows as ScoresRows
    from agentenv.training.learners.losses import rows_loss as rows_loss
    from agentenv.training.metrics import Meter as Meter
    from agentenv.training.rows import Row as Row
    from agentenv.training.rows import Scores as Scores

__all__ = door(__name__)
