"""What one step samples: the episodes of its groups, and the distribution of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from agentenv.core.fields import NonNegativeInt, PositiveFloat, PositiveInt, check_fields

__all__ = ["SamplingOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """What one step samples: the episodes of its groups, and the distribution of their tokens.

    Raises:
        UsageError: A value is outside its range.
    """

    groups_per_step: PositiveInt = 4
    """Number of tasks per step. Each task is played as a group of `num_generations` episodes. With 8 episodes
    each, 4 groups are as many as a small machine plays in a minute; published runs have 32 to 512."""
    num_generations: PositiveInt = 8
    """Group size: episodes of one task that are compared with each other, 8 as in TRL. 1 needs an
    `advantage_fn`."""
    refill_rounds: NonNegativeInt = 0
    """DAPO's dynamic sampling: rounds of extra tasks played while too few groups have a spread. Groups
    without one then do not count in the weights of the other tokens. Without refills they do, as GRPO and its
    relatives were published; see `LossOptions.trains_zero_std`."""
    temperature: Annotated[PositiveFloat, "greedy samples have no gradient estimate"] = 1.0
    """Sampling temperature. The trained distribution has the same temperature, so episodes that were recorded
    at another one are refused. 0 is refused, because greedy samples have no gradient."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample from the likeliest tokens whose probabilities sum to this; 1 means all tokens.

    With `top_p`, `top_k` or `min_p` the engine returns the tokens that were left to sample each token from,
    and all log-probabilities of the training are those among them (`agentenv.core.supports`).
    """
    top_k: NonNegativeInt = 0
    """Sample from this many likeliest tokens; 0 means no limit."""
    min_p: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Leave out tokens less likely than this share of the likeliest token; 0 leaves out none."""
    stop: tuple[str, ...] = ()
    """Stop strings: texts that end a completion, as in `Sampling.stop`."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_cut(self) -> bool:
        """Whether tokens are sampled from a cut distribution, and trained on their supports."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0
