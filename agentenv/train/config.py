"""What a training run is told: one frozen dataclass, with TRL's names where TRL has one."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Gt, Lt

from agentenv.core.bounds import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_bounds,
)
from agentenv.core.errors import UsageError

__all__ = ["GRPOConfig", "LoraOptions", "LossType", "Reduction", "refuse_groups_of_one"]

LossType: TypeAlias = Literal[
    "dapo", "grpo", "dr_grpo", "prompt_mean", "cispo", "sapo", "reinforce", "dppo", "gmpo", "gpg"
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
}
"""The reduction that each loss type was published with; `GRPOConfig.reduction` overrides it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters instead of a full fine-tune (needs peft); a model with adapters keeps its own."""

    r: PositiveInt = 16
    alpha: PositiveInt = 32
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Not 0 makes the trainer's logprobs differ from the sampler's."""
    target_modules: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """Options of a GRPO run.

    Raises:
        UsageError: A value is outside its range, or two options exclude each other.
    """

    model: str = ""
    """Path or Hub id of a causal language model, or a .gguf file."""
    engine: str = ""
    """What samples: a vLLM server (`http://HOST:PORT/v1`) or `vllm:PATH`; the trainer's model if empty."""
    output_dir: str = "runs/train"
    """Where `metrics.jsonl` and `checkpoints/` go."""
    seed: int = 0

    # What one step trains on
    groups_per_step: PositiveInt = 4
    """Tasks played for one step; a group of `num_generations` episodes each."""
    num_generations: PositiveInt = 8
    """Episodes of one task, compared with each other (the group size). 1 needs an `advantage_fn`."""
    num_iterations: PositiveInt = 1
    """Passes over the same batch; more than 1 makes it off-policy."""
    num_minibatches: PositiveInt = 1
    """Optimiser steps of one pass; the groups are dealt out whole."""
    max_steps: NonNegativeInt = 20
    temperature: Annotated[PositiveFloat, "greedy samples have no gradient estimate"] = 1.0
    """Of sampling, and so of the trained distribution. 0 is refused: greedy samples have no gradient."""
    drop_zero_std: bool = True
    """Leave out groups without any advantage: they cost a pass and dilute the token mean."""
    refill_rounds: NonNegativeInt = 0
    """DAPO's dynamic sampling: rounds of further tasks while groups with a gradient are missing."""
    max_staleness: NonNegativeInt | None = None
    """Episodes with a token sampled more than this many weight versions (optimiser steps) ago are left
    out; None keeps all. What is kept is corrected by its importance ratio, to the sampler's logprobs."""
    mask_truncated_completions: bool = False
    """Leave out episodes whose stop reason is a limit; they stay in the group's statistics."""
    overlong_penalty_tokens: NonNegativeInt = 0
    """DAPO's soft overlong penalty: the reward falls linearly to -1 over the last so many tokens."""
    max_completion_length: PositiveInt | None = None
    """Sampled tokens of an episode, for the overlong penalty and `constant` reduction."""

    # The loss
    loss_type: LossType = "dapo"
    """Surrogate and its published reduction; see `agentenv.train.objective.loss`."""
    reduction: Reduction | None = None
    """Override the loss type's reduction."""
    epsilon: Annotated[float, Ge(0), Lt(1), "the lower clip is 1 - epsilon"] = 0.2
    epsilon_high: NonNegativeFloat = 0.28
    """Clip-higher (DAPO): leaves room for rare good tokens, against entropy collapse."""
    delta: float | None = None
    """Two-sided clip: upper bound of the ratio in the unclipped term (TRL's `delta`)."""
    dual_clip: Annotated[float, Gt(1), Lt(inf)] | None = None
    """Upper bound of the loss of a negative advantage, as a multiple of it; usually 3."""
    ratio_max: PositiveFloat = 5.0
    """CISPO: the absolute upper bound of the importance ratio (elsewhere also 1 + this)."""
    sapo_temperature_pos: PositiveFloat = 1.0
    sapo_temperature_neg: PositiveFloat = 1.05
    dppo_low: NonNegativeFloat = 0.2
    dppo_high: NonNegativeFloat = 0.2
    """DPPO: bounds on the change of a token's probability (not of its ratio)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """`sequence` is GSPO: one ratio, the geometric mean over the sequence's tokens."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What advantages are divided by: the group's standard deviation, the batch's (of all processes), or
    nothing."""
    advantage: Literal["grpo", "rloo"] = "grpo"
    advantage_level: Literal["episode", "turn"] = "episode"
    """`turn`: each turn's return-to-go, compared with the returns of the group's episodes."""
    advantage_eps: PositiveFloat = 1e-4
    turn_discount: NonNegativeFloat = 1.0
    beta: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence to the reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    use_bias_correction_kl: bool = False
    """Multiply the KL term by the importance ratio (unbiased off-policy)."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy, added as a bonus."""
    sft_coef: NonNegativeFloat = 1.0
    """Weight of the cross entropy on demonstrations given to `step`."""

    # Sampler and trainer disagree
    old_logprobs: Literal["sampler", "recompute"] = "sampler"
    """Proximal policy: the sampler's logprobs as they are, or scored again before the first update."""
    importance_correction: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = None
    """TIS (truncate) or MIS/IcePop (mask) on exp(old - sampler), per token or per sequence; needs
    `old_logprobs="recompute"`, without which there is nothing between the two."""
    importance_cap: PositiveFloat = 2.0
    importance_floor: NonNegativeFloat = 0.5
    """Lower bound for the `_mask` modes."""
    off_policy_mask_threshold: float | None = None
    """OPSM: leave out sequences with negative advantage that drifted further than this."""

    # Optimiser
    optim: str = "adamw"
    """`adamw`, or an import string such as `bitsandbytes.optim:AdamW8bit`."""
    learning_rate: PositiveFloat = 1e-6
    adam_beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    adam_beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    adam_epsilon: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    lora: LoraOptions | None = None

    # Compute
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Of the weights; `auto` is bfloat16 where the device multiplies it fast. It trains f32 masters."""
    device: str = "auto"
    packing: Literal["auto", "shared", "padded"] = "auto"
    """`auto` packs rows with shared prefixes where that was proven exact and costs less."""
    tokens_per_micro_batch: PositiveInt = 4096
    """Upper bound of one forward pass; a longer single row goes alone."""
    logprob_chunk: PositiveInt = 256
    """Trained tokens that pass the LM head at once: bounds the memory of the logits."""
    gradient_checkpointing: bool = False
    """Make activations again in the backward pass: half their memory or less for a quarter more time."""
    fsdp: bool = False
    """Under torchrun, shard the model over the ranks (FSDP2) instead of replicating it. The trainer then
    needs an engine beside it: a server, or one on a copy of the model in each process."""

    # The loop
    asynchronous: bool = False
    """Play the next batch while this one trains: one step ahead, never more. The in-process engine then
    samples from a copy of the weights; results depend on timing and so do not repeat to the bit."""
    max_prompt_length: PositiveInt | None = None
    """Tasks with more tokens in their first prompt are left out; None: more than the context leaves."""
    check_prompts: bool = True
    """Begin every task that the run will meet once before it starts, to leave out too long prompts."""
    eval_steps: NonNegativeInt = 0
    """Evaluate greedily on held-out tasks every so many steps; 0 is only at the end."""
    eval_tasks: NonNegativeInt = 0
    """Held-out tasks to use; 0 is all."""
    save_steps: NonNegativeInt = 0
    save_total_limit: NonNegativeInt | None = None
    report_to: tuple[str, ...] = ()
    """Trackers beside `metrics.jsonl`: trackio, wandb, tensorboard."""
    top_kl_tokens: NonNegativeInt = 0
    """So many tokens of each step with the highest KL are listed with their text in `kl_tokens.jsonl`."""
    notify: tuple[str, ...] = ()
    """Addresses of apprise (`mailto://...`, `ntfys://...`) that are told when `train` fails."""

    def __post_init__(self) -> None:
        check_bounds(self)
        self._check_clips()
        self._check_reduction()
        updates = self.num_iterations * self.num_minibatches
        if self.asynchronous and self.max_staleness is not None and self.max_staleness < updates:
            raise UsageError(
                f"max_staleness={self.max_staleness} would leave out all asynchronous episodes: they are "
                f"up to {updates} versions old (num_iterations * num_minibatches)",
                remedy="give at least that or None",
            )

    def _check_clips(self) -> None:
        if self.delta is not None and self.delta <= 1 + self.epsilon_high:
            raise UsageError(
                f"delta must be above 1 + epsilon_high = {1 + self.epsilon_high}, not {self.delta}"
            )
        if not self.importance_floor < self.importance_cap:
            raise UsageError(
                f"importance_floor {self.importance_floor} must be below importance_cap {self.importance_cap}"
            )
        if self.importance_correction is not None and self.old_logprobs == "sampler":
            raise UsageError(
                f"importance_correction={self.importance_correction!r} corrects what lies between the old "
                "logprobs and the sampler's: nothing with old_logprobs='sampler'",
                remedy="use 'recompute'",
            )

    def _check_reduction(self) -> None:
        if self.importance_sampling_level == "sequence" and self.scheme == "token_mean":
            raise UsageError("importance_sampling_level='sequence' (GSPO) needs reduction 'seq_mean'")
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

    @property
    def scheme(self) -> Reduction:
        """The reduction in force: `reduction`, or that of the loss type."""
        return self.reduction or REDUCTION_OF[self.loss_type]


def refuse_groups_of_one(config: GRPOConfig) -> None:
    """Refuse to play groups in which there is nothing to compare.

    Raises:
        UsageError: `num_generations` is 1.
    """
    if config.num_generations == 1:
        raise UsageError(
            "num_generations=1 (-k 1) can never train: advantages compare the episodes of one task",
            remedy="play 2 or more, or give GRPOTrainer an advantage_fn of your own",
        )
