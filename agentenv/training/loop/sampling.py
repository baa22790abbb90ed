"""The sampling settings of a training."""

from __future__ import annotations

from agentenv.engine.base import Sampling
from agentenv.training.learners.base import Learner

__all__ = ["training_sampling"]


def training_sampling(learner: Learner) -> Sampling:
    """Return the settings with which the episodes of a training are sampled, on engines and in workers."""
    config = learner.config
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        # Each token is trained as one of those that it was sampled from.
        keep_support=config.is_cut,
        stop=config.stop,
        adapter=learner.adapter,
    )
