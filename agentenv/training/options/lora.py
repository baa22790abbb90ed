"""How adapters are trained in place of all weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt

from agentenv.core.fields import PositiveInt, check_fields

__all__ = ["LoraOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Train low-rank adapters instead of all weights. This needs peft.

    A model that already has adapters keeps them, and these options are not used.
    """

    r: PositiveInt = 16
    """Rank of the adapters; reinforcement learning needs little (LoRA Without Regret, 2025)."""
    alpha: PositiveInt = 32
    """The adapters count `alpha / r` times."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout of the adapters. A value above 0 makes the trainer's logprobs differ from the sampler's."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """The layers that get adapters; all, because those of the attention alone learn less."""

    def __post_init__(self) -> None:
        check_fields(self)
