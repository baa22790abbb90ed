"""The loss and the advantages: which of the published ones, and what each of them takes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from numbers import Real
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Lt

from agentenv.core.errors import UsageError
from agentenv.core.fields import NonNegativeFloat, NonNegativeInt, PositiveInt, check_fields

__all__ = ["LossOptions", "LossType", "Reduction"]

LossType: TypeAlias = Literal[
    "dapo", "grpo", "dr_grpo", "prompt_mean", "cispo", "sapo", "reinforce", "dppo", "gmpo", "gpg", "distill"
]
Reduction: TypeAlias = Literal["token_mean", "seq_mean", "constant", "prompt_mean"]

REDUCTION_OF: dict[str, Reduction] = {
    "dapo": "token_mean",
    "grpo": "seq_mean",
    "dr_grpo": "constant",
    "prompt_mean": "prompt_mean",
    "cispo": "token_mean",
    "sapo": "seq_mean",
    "reinforce": "token_mean",
    "dppo": "token_mean",
    "gmpo": "seq_mean",
    "gpg": "token_mean",
    "distill": "token_mean",
}
"""The reduction that each loss type was published with; `LossOptions.reduction` overrides it."""

_CLIPPED = frozenset({"dapo", "grpo", "dr_grpo", "prompt_mean"})
READ_BY: dict[str, frozenset[str]] = {
    "epsilon": _CLIPPED | {"dppo", "gmpo"},
    "epsilon_high": _CLIPPED | {"dppo", "gmpo", "cispo"},
    "delta": _CLIPPED,
}
"""The loss types that an option is for; with another one it would have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """The loss and the advantages: which of the published ones, and what each of them takes.

    Raises:
        UsageError: A value is outside its range, or two options exclude each other.
    """

    loss_type: LossType = "dapo"
    """Name of the surrogate loss. It also selects the reduction that the loss was published with; see
    `agentenv.training.objective.loss`. `dapo` is TRL's default, too."""
    reduction: Reduction | None = None
    """Reduction to use instead of the loss type's own, such as CISPO's losses with the mean of each prompt
    (ScaleRL); None uses that of the loss type."""
    epsilon: Annotated[float, Ge(0), Lt(1), "the lower clip is 1 - epsilon"] | None = None
    """Lower clip is 1 - this; for DPPO, the bound of how far a token's probability may fall. None means 0.2,
    and 3e-4 with `importance_sampling_level="sequence"`, whose
    ratios hardly move (GSPO, arXiv 2507.18071, section 5.1)."""
    epsilon_high: NonNegativeFloat | None = None
    """Upper clip is 1 + this; for DPPO, the bound of how far a token's probability may rise; for CISPO, as in
    TRL, the bound of the ratio itself. None means 0.28 (DAPO's clip-higher: a wide clip lets rare good tokens
    grow, which counters entropy collapse), 0.2 for DPPO, 5 for CISPO (ScaleRL), and 4e-4 with
    `importance_sampling_level="sequence"` (GSPO)."""
    delta: float | None = None
    """Upper bound of the ratio in the unclipped term, for a two-sided clip (TRL's `delta`). It bounds the
    loss of a token with a negative advantage, as PPO's dual clip does; usually 3."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """`token` uses one importance ratio per token; `sequence` (GSPO) uses one per sequence, the geometric
    mean over its tokens."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divisor of the advantages: the standard deviation of the group, that of the batch (over all
    processes), or none."""
    advantage: Literal["grpo", "rloo"] = "grpo"
    """Baseline of the advantages: the group's mean (`grpo`), or the mean of the other members (`rloo`)."""
    turn_discount: NonNegativeFloat | None = None
    """Give each turn an advantage of its own, from its return-to-go with this discount; 1 discounts nothing,
    and 0 counts the turn's own reward only. None gives all tokens of an episode one advantage, because most
    environments reward the end alone."""
    mask_truncated_completions: bool = False
    """Leave out episodes that a limit stopped. Their rewards still count in the group's statistics."""
    overlong_penalty_tokens: NonNegativeInt = 0
    """DAPO's soft overlong penalty: over this many last tokens before `max_completion_length`, the penalty
    grows linearly to -1. 0 switches it off."""
    max_completion_length: PositiveInt | None = None
    """Largest number of sampled tokens in an episode. The overlong penalty and the `constant` reduction use
    it."""
    teacher: str = ""
    """Model that takes the place of the reference, with the same tokenizer: a directory, a Hub id, a .gguf
    file, or the http://HOST:PORT/v1 of vLLM servers. `loss_type="distill"` imitates it on the policy's own
    episodes, and `beta` keeps the policy close to it. Empty means the first weights of the policy."""
    beta: float | tuple[float, ...] = 0.0
    """Coefficient of the KL divergence to the reference model. 0 as in TRL and DAPO, and needs no reference.
    A list has one for the first attempt, the second, and so on, as the environment marks them with
    `context.attempt`; the last one holds for all later attempts. `(1, 0)` keeps the first attempt alone close
    to the reference (SCoRe, arXiv 2409.12917, stage I)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of the KL; `k3` is GRPO's."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss, as in GRPO, or is subtracted from the reward, as in PPO."""
    use_bias_correction_kl: bool = False
    """Multiply the KL term by the importance ratio, so that the term is unbiased on off-policy tokens."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0 as in DAPO, whose clip-higher takes its place."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the load balancing loss of a mixture of experts, over all tokens that a pass computes,
    prompts included and padding left out; see `training.learners.torch.passes`. Models are published with
    0.001 to 0.02. 0 leaves it out, and a model without routers is refused."""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_unread()
        if self.delta is not None and self.delta <= 1 + self.clip[1]:
            raise UsageError(f"delta must be above 1 + epsilon_high = {1 + self.clip[1]}, not {self.delta}")
        if self.loss_type == "cispo" and (bound := self.epsilon_high) is not None and bound < 1:
            raise UsageError(
                f"CISPO bounds the ratio itself, so epsilon_high={bound:g} would shrink all gradients",
                remedy="set 1 or more; 5 is usual",
            )
        self._check_reduction()
        self._check_kl()
        self._check_teacher()

    def _check_unread(self) -> None:
        for option in fields(self):
            value, losses = getattr(self, option.name), READ_BY.get(option.name)
            if losses is not None and value != option.default and self.loss_type not in losses:
                raise UsageError(
                    f"{option.name}={value:g} has no effect with loss_type={self.loss_type!r}",
                    remedy=f"leave it out; it is for {', '.join(sorted(losses))}",
                )

    def _check_reduction(self) -> None:
        if self.importance_sampling_level == "sequence" and self.scheme == "token_mean":
            raise UsageError(
                "importance_sampling_level='sequence' (GSPO) cannot be combined with reduction 'token_mean'",
                remedy="set reduction='seq_mean'",
            )
        if self.max_completion_length is None:
            if self.scheme == "constant":
                raise UsageError("reduction 'constant' (Dr.GRPO) needs max_completion_length")
            if self.overlong_penalty_tokens:
                raise UsageError("overlong_penalty_tokens needs max_completion_length")
        elif self.overlong_penalty_tokens > self.max_completion_length:
            raise UsageError(
                f"overlong_penalty_tokens must be at most max_completion_length = "
                f"{self.max_completion_length}, not {self.overlong_penalty_tokens}"
            )

    def _check_kl(self) -> None:
        if isinstance(self.beta, list):
            object.__setattr__(self, "beta", tuple(self.beta))
        for number in self.betas:
            if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= number < inf:
                raise UsageError(
                    f"beta must be finite and 0 or more, or a list of such numbers, not {self.beta!r}"
                )
        if self.use_bias_correction_kl and (self.kl_in == "reward" or not self.has_kl):
            raise UsageError(
                "use_bias_correction_kl has no effect without a KL term in the loss",
                remedy="set beta above 0 and kl_in='loss', or leave it out",
            )

    def _check_teacher(self) -> None:
        distills = self.loss_type == "distill"
        if distills and not self.teacher:
            raise UsageError("loss_type='distill' needs a teacher", remedy="set teacher to a model")
        if self.teacher and not distills and not self.has_kl:
            raise UsageError(
                f"teacher={self.teacher!r} has no effect",
                remedy="set loss_type='distill', or beta above 0",
            )

    @property
    def betas(self) -> tuple[float, ...]:
        """The coefficient of the KL in each attempt; the last one holds for all later attempts."""
        return self.beta if isinstance(self.beta, tuple) else (self.beta,)

    @property
    def has_kl(self) -> bool:
        """Whether the KL to the reference counts in any attempt."""
        return any(self.betas)

    @property
    def teacher_is_served(self) -> bool:
        """Whether the teacher is on servers, and not in the trainer's process."""
        return self.teacher.startswith(("http://", "https://"))

    @property
    def clip(self) -> tuple[float, float]:
        """How far below and above 1 a ratio is clipped: `epsilon` and `epsilon_high`, or their defaults."""
        low, high = (0.2, 0.2) if self.loss_type == "dppo" else (0.2, 0.28)
        if self.importance_sampling_level == "sequence":
            low, high = 3e-4, 4e-4
        if self.loss_type == "cispo":
            return 1.0, (5.0 if self.epsilon_high is None else self.epsilon_high) - 1
        return (
            low if self.epsilon is None else self.epsilon,
            high if self.epsilon_high is None else self.epsilon_high,
        )

    @property
    def trains_zero_std(self) -> bool:
        """Whether groups without spread have a gradient: not from their advantages, which are all 0."""
        in_loss = self.has_kl and self.kl_in == "loss"
        return self.loss_type == "distill" or in_loss or bool(self.entropy_coef)

    @property
    def scheme(self) -> Reduction:
        """The reduction that is used: `reduction`, or that of the loss type."""
        return self.reduction or REDUCTION_OF[self.loss_type]
