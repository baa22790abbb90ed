"""The learner on a server of the Tinker API, which holds the weights and the optimiser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.training.learners.tinker.learner import TinkerLearner as TinkerLearner
    from agentenv.training.learners.tinker.probe import Traits as Traits
    from agentenv.training.learners.tinker.probe import probe as probe

__all__ = door(__name__)
