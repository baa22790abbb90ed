"""The optimiser and the schedule of its learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from agentenv.core.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, check_fields

__all__ = ["OptimizerOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """The optimiser and the schedule of its learning rate.

    Raises:
        UsageError: A value is outside its range.
    """

    optim: str = "adamw"
    """Optimiser: `adamw`, or an import string such as `bitsandbytes.optim:AdamW8bit`."""
    learning_rate: PositiveFloat | None = None
    """None goes by the model's width, from 1e-5 for up to 512 hidden units to 1e-6 for 5,120 and more, and is
    ten times as much with LoRA; see `agentenv.training.rate`."""
    adam_beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the mean of gradients, as everywhere."""
    adam_beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    """Decay of the mean of squared gradients. A run has few steps, so it forgets sooner than with 0.999."""
    adam_epsilon: NonNegativeFloat = 1e-8
    """Added to the root of the mean of squared gradients, as everywhere."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of the matrices. Norms and biases do not decay. 0 as in TRL, because runs are short."""
    max_grad_norm: PositiveFloat = 1.0
    """Norm to which larger gradients are scaled, as in TRL: one odd batch must not move the weights far."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 over the steps of the run, whether they have a gradient or not.
    `constant` as in DAPO, and because a resumed run may become longer."""
    warmup_steps: NonNegativeInt = 0
    """Number of training steps in which the learning rate rises linearly."""
    optimizer_offload: bool = False
    """Keep the float32 masters and the optimiser's state in main memory and compute its step there, which
    leaves a GPU the weights and the gradients. A step takes longer: gradients and weights are copied. On the
    CPU it only takes memory. Checkpoints can be resumed with and without it."""

    def __post_init__(self) -> None:
        check_fields(self)
