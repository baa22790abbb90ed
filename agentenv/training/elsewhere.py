"""Trainings whose weights are not on this machine: a form of model string may bring its own learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from agentenv.engine.forms import engine_registry
from agentenv.engine.interface import Engine
from agentenv.render.tokenizer import ChatTokenizer
from agentenv.training.config import GRPOConfig
from agentenv.training.learners.learner import BringsWeights, KeepsFiles, Learner
from agentenv.training.learners.torch.world import World

__all__ = ["LearnerElsewhere", "LearnerForm", "learner_form"]


class LearnerElsewhere(Learner, BringsWeights, KeepsFiles, Protocol):
    """A learner whose weights are elsewhere: it brings them to its engine, and keeps them in checkpoints."""

    @property
    def world(self) -> World:
        """The processes that train together: this one."""
        ...


class LearnerForm(Protocol):
    """What `ModelForm.learner` returns: a module or an object that trains the models of this form."""

    def refuse(self, config: GRPOConfig, options: Mapping[str, Any]) -> None:
        """Refuse a training that cannot be done, before a run directory is made.

        Args:
            config: the run's options, with the model string as `model`.
            options: options of the engine.

        Raises:
            UsageError: An option asks for what cannot be done.
        """
        ...

    def open(
        self,
        model: str,
        config: GRPOConfig,
        tokenizer: ChatTokenizer | None,
        options: Mapping[str, Any] | None,
    ) -> tuple[LearnerElsewhere, Engine, ChatTokenizer]:
        """Return the learner, the engine that samples from it, and the model's tokenizer.

        Args:
            model: the model string.
            config: the run's options.
            tokenizer: the tokenizer that the user passed, if any.
            options: options of the engine.
        """
        ...


def learner_form(model: object) -> LearnerForm | None:
    """Return what trains the models that a model string names; None if this machine trains them."""
    kind, colon, _ = model.partition(":") if isinstance(model, str) else ("", "", "")
    learner = engine_registry[kind].learner if colon and kind in engine_registry else None
    return None if learner is None else learner()
