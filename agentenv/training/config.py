"""The options of a training run: one frozen dataclass that uses TRL's names where TRL has the option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt, Le, Lt

from agentenv.core.errors import UsageError
from agentenv.core.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_fields,
)

__all__ = [
    "GRPOConfig",
    "LoraOptions",
    "LossType",
    "Reduction",
    "refuse_groups_of_one",
    "refuse_reward_options",
]

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
"""The reduction that each loss type was published with; `GRPOConfig.reduction` overrides it."""

_CLIPPED = frozenset({"dapo", "grpo", "dr_grpo", "prompt_mean"})
READ_BY: dict[str, frozenset[str]] = {
    "epsilon": _CLIPPED | {"dppo", "gmpo"},
    "epsilon_high": _CLIPPED | {"dppo", "gmpo"},
    "delta": _CLIPPED,
    "ratio_max": frozenset({"cispo"}),
    "sapo_temperature_pos": frozenset({"sapo"}),
    "sapo_temperature_neg": frozenset({"sapo"}),
}
"""The loss types that an option is for; with another one it would have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Train low-rank adapters instead of all weights. This needs peft.

    A model that already has adapters keeps them, and these options are not used.
    """

    r: PositiveInt = 16
    alpha: PositiveInt = 32
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout of the adapters. A value above 0 makes the trainer's logprobs differ from the sampler's."""
    target_modules: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """Options of a GRPO run.

    Raises:
        UsageError: A value is outside its range, or two options exclude each other.
    """

    model: str = ""
    """Path or Hub id of a causal language model, or a .gguf file."""
    engine: str = ""
    """Engine that generates episodes: vLLM servers (`http://HOST:PORT/v1`, `servers:FILE`) or `vllm:PATH`;
    empty means the trained model."""
    workers: NonNegativeInt = 0
    """Number of worker processes, for each process of a launch, that play the episodes; 0 plays them in the
    trainer's process. The engine must be a server. `runner.concurrency` limits the episodes of all workers
    together."""
    ray: str = ""
    """Address of a Ray cluster on which the workers are placed, or `auto`; empty for processes of this
    machine."""
    worker_env: tuple[str, ...] = ()
    """Names of environment variables that the actors of a Ray cluster get from this process; their values are
    not recorded. Processes of this machine have all of them."""
    ray_options: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """Options of Ray for each worker: `num_cpus`, `num_gpus`, `memory`, `resources`, `label_selector` and
    `runtime_env`."""
    output_dir: str = "runs/train"
    """Directory that `metrics.jsonl` and `checkpoints/` are written to."""
    seed: int = 0

    # What one step trains on
    groups_per_step: PositiveInt = 4
    """Number of tasks per step. Each task is played as a group of `num_generations` episodes."""
    num_generations: PositiveInt = 8
    """Group size: episodes of one task that are compared with each other. 1 needs an
    `advantage_fn`."""
    num_iterations: PositiveInt = 1
    """Number of passes over the same batch. More than 1 makes the later updates off-policy."""
    num_minibatches: PositiveInt = 1
    """Number of optimiser steps in one pass. A group is never split between them."""
    max_steps: NonNegativeInt = 20
    """Number of training steps of the whole run."""
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
    refill_rounds: NonNegativeInt = 0
    """DAPO's dynamic sampling: rounds of extra tasks played while too few groups have a spread. Groups
    without one then do not count in the weights of the other tokens. Without refills they do, as GRPO and its
    relatives were published; see `trains_zero_std`."""
    mask_truncated_completions: bool = False
    """Leave out episodes that a limit stopped. Their rewards still count in the group's statistics."""
    overlong_penalty_tokens: NonNegativeInt = 0
    """DAPO's soft overlong penalty: over this many last tokens before `max_completion_length`, the penalty
    grows linearly to -1. 0 switches it off."""
    max_completion_length: PositiveInt | None = None
    """Largest number of sampled tokens in an episode. The overlong penalty and the `constant` reduction use
    it."""

    # The loss
    loss_type: LossType = "dapo"
    """Name of the surrogate loss. It also selects the reduction that the loss was published with; see
    `agentenv.training.objective.loss`."""
    teacher: str = ""
    """Model that takes the place of the reference, with the same tokenizer: a directory, a Hub id, a .gguf
    file, or the http://HOST:PORT/v1 of vLLM servers. `loss_type="distill"` imitates it on the policy's own
    episodes, and `beta` keeps the policy close to it. Empty means the first weights of the policy."""
    reduction: Reduction | None = None
    """Reduction to use instead of the loss type's own; None uses that of the loss type."""
    epsilon: Annotated[float, Ge(0), Lt(1), "the lower clip is 1 - epsilon"] | None = None
    """Lower clip is 1 - this; for DPPO, the bound of how far a token's probability may fall. None means 0.2,
    and 3e-4 with `importance_sampling_level="sequence"`, whose
    ratios hardly move (GSPO, arXiv 2507.18071, section 5.1)."""
    epsilon_high: NonNegativeFloat | None = None
    """Upper clip is 1 + this; for DPPO, the bound of how far a token's probability may rise. None means 0.28
    (DAPO's clip-higher: a wide clip lets rare good tokens grow, which counters entropy collapse), 0.2 for
    DPPO, and 4e-4 with `importance_sampling_level="sequence"` (GSPO)."""
    delta: float | None = None
    """Upper bound of the ratio in the unclipped term, for a two-sided clip (TRL's `delta`). It bounds the
    loss of a token with a negative advantage, as PPO's dual clip does; usually 3."""
    ratio_max: PositiveFloat = 5.0
    """CISPO: absolute upper bound of the importance ratio. Some other libraries set the bound to 1 + this
    value."""
    sapo_temperature_pos: PositiveFloat = 1.0
    sapo_temperature_neg: PositiveFloat = 1.05
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """`token` uses one importance ratio per token; `sequence` (GSPO) uses one per sequence, the geometric
    mean over its tokens."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divisor of the advantages: the standard deviation of the group, that of the batch (over all
    processes), or none."""
    advantage: Literal["grpo", "rloo"] = "grpo"
    """Baseline of the advantages: the group's mean (`grpo`), or the mean of the other members (`rloo`)."""
    advantage_level: Literal["episode", "turn"] = "episode"
    """`episode` gives all tokens of an episode one advantage; `turn` gives each turn its own, from the turn's
    return-to-go."""
    turn_discount: NonNegativeFloat = 1.0
    beta: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence to the reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_weights: tuple[float, ...] = ()
    """Factors of `beta` for the first attempt, the second, and so on, as the environment marks them with
    `context.attempt`; the last one holds for all later attempts. `(1, 0)` keeps the first attempt alone close
    to the reference (SCoRe, arXiv 2409.12917, stage I). Empty means 1 for all."""
    use_bias_correction_kl: bool = False
    """Multiply the KL term by the importance ratio, so that the term is unbiased on off-policy tokens."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the load balancing loss of a mixture of experts, over all tokens that a pass computes,
    prompts included and padding left out; see `training.learners.torch.passes`. Models are published with
    0.001 to 0.02. 0 leaves it out, and a model without routers is refused."""
    sft_coef: NonNegativeFloat = 1.0
    """Weight of the cross entropy on the demonstrations that are passed to `step`."""
    demo_min_reward: float | None = None
    """Least reward of a demonstration that the warm-up of `ae.train` imitates; None takes any."""
    demo_epochs: PositiveInt = 1
    """Number of times that the warm-up of `ae.train` goes through the demonstrations, in steps of 8. A
    small set of tasks needs several."""

    # Differences between sampler and trainer
    old_logprobs: Literal["sampler", "recompute"] | None = None
    """Logprobs of the proximal policy: the sampler's own, or recomputed by the trainer before the first
    update. None means `recompute` with a separate `engine`, whose numbers differ from the trainer's, as long
    as each step plays its own batch; and with `importance_sampling_level="sequence"`, whose clip is narrower
    than such differences. Otherwise it means `sampler`."""
    importance_correction: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off"] | None
    ) = None
    """TIS (truncate) or MIS/IcePop (mask) on exp(old - sampler), per token or per sequence. This needs
    recomputed logprobs; otherwise old and sampler logprobs are equal. None means `token_truncate` for
    recomputed logprobs with a separate `engine` and where episodes are played ahead, and otherwise `off`."""
    importance_cap: Annotated[float, Gt(1), Lt(inf)] = 2.0
    """Upper bound of the importance correction. The `_mask` modes keep ratios from 1 / this to this."""
    router_replay: bool = False
    """Send each token of a mixture of experts to the experts that the engine chose for it (rollout routing
    replay, R3, arXiv 2510.11370), in all passes of the policy and its reference. The routers still weight the
    experts and are trained. The engine must tell its choices; see `training.learners.torch.routers`."""
    off_policy_mask_threshold: float | None = None
    """OPSM: leave out sequences with a negative advantage whose mean of sampler - policy logprobs exceeds
    this."""

    # Optimiser
    optim: str = "adamw"
    """Optimiser: `adamw`, or an import string such as `bitsandbytes.optim:AdamW8bit`."""
    learning_rate: PositiveFloat | None = None
    """None goes by the model's width, from 1e-5 for up to 512 hidden units to 1e-6 for 5,120 and more, and is
    ten times as much with LoRA; see `agentenv.training.rate`."""
    adam_beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    adam_beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    adam_epsilon: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of the matrices. Norms and biases do not decay."""
    max_grad_norm: PositiveFloat = 1.0
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 over the steps of the run, whether they have a gradient or not."""
    warmup_steps: NonNegativeInt = 0
    """Number of training steps in which the learning rate rises linearly."""
    optimizer_offload: bool = False
    """Keep the float32 masters and the optimiser's state in main memory and compute its step there, which
    leaves a GPU the weights and the gradients. A step takes longer: gradients and weights are copied. On the
    CPU it only takes memory. Checkpoints can be resumed with and without it."""
    train_vision: bool = False
    """Whether the vision tower of a model that sees is trained, too; LoRA trains the language model only."""
    lora: LoraOptions | None = None
    """Train LoRA adapters with these options; None trains all weights."""

    # Compute
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Number format of the weights. `auto` is bfloat16 on a GPU and float32 on a CPU, where models are small
    and runs short: bfloat16 rounds most small changes of a weight away. With LoRA the base is bfloat16
    wherever the device multiplies it fast. The optimiser keeps float32 masters of bfloat16 weights."""
    device: str = "auto"
    packing: Literal["auto", "shared", "padded"] = "auto"
    """Layout of the rows in a forward pass: `shared` packs them with shared prefixes and `padded` pads them.
    `auto` packs if a check at the start found packing exact for the model and it costs less."""
    tokens_per_micro_batch: PositiveInt | None = None
    """Largest number of tokens in one forward pass. A longer row gets a pass of its own. None means 4,096 at
    first. On a GPU each update then sets it to what the memory holds, as far as was measured, and at most
    doubles it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: at most half their memory for a quarter more time."""
    torch_compile: bool = False
    """Compile the layers of the model (`torch.compile`), which joins small operations on a GPU. A check at
    the start, which compiles first, compares gradients and leaves it out where they differ. On the CPU it
    takes the place of the trainer's own operations, which are faster."""
    fsdp: bool | int = False
    """Under torchrun, shard the model over the ranks (FSDP2) instead of replicating it. With a number, each
    copy of the model is sharded over so many neighbouring ranks, such as those of one machine, and the copies
    are replicas of each other (HSDP). The trainer then needs a separate engine: a server, or one on a copy of
    the model in each process."""
    reduce_gradients: Literal["auto", "step", "micro_batch"] = "auto"
    """When the gradients of a sharded model are added over the ranks. `step` adds them once, after the last
    micro-batch, and until then each device holds those of the whole model (4 bytes for each trained
    parameter). `micro_batch` adds them after each micro-batch, which needs no such memory and more traffic.
    `auto` is `step` where they take at most a quarter of the device's memory, and on the CPU."""

    # The loop
    max_ahead: NonNegativeInt = 0
    """Play a stream of groups while batches train: each step trains on the first groups that finish. A group
    is trained at most this many steps after it began, and at most `(max_ahead + 1) * groups_per_step` groups
    are under way. 0 plays each batch when the last one was trained. An in-process engine then samples from a
    copy of the weights. Results depend on timing, so a run does not repeat bit by bit."""
    max_prompt_length: PositiveInt | None = None
    """Tasks whose first prompt has more tokens than this, or leaves no room for an answer, are left out.
    Every task of the run is reset once before the first step to find them. None resets none."""
    rollout: str = ""
    """Function that plays the episodes of each step, as `file.py:function` or `module:function`; empty means
    the runner. See `agentenv.training.RolloutRequest`."""
    eval_steps: NonNegativeInt = 0
    """Number of steps between evaluations on held-out tasks; 0 evaluates only at the end."""
    eval_on_start: bool = False
    """Evaluate before the first step, too, after the warm-up; its metrics are those of step 0."""
    eval_tasks: NonNegativeInt = 0
    """Number of held-out tasks to evaluate on; 0 means all."""
    eval_temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the evaluations; 0 is greedy."""
    num_generations_eval: PositiveInt = 1
    """Number of episodes of each held-out task. With several, `eval/success` is their mean (avg@k), and
    `eval/pass@k` is the chance that at least one of them succeeds; `eval_temperature` must be above 0."""
    save_steps: NonNegativeInt = 0
    """Number of steps between checkpoints; 0 saves none in between. The last step is always saved."""
    save_total_limit: NonNegativeInt | None = None
    """Number of checkpoints to keep, the newest and at least one; None keeps all."""
    report_to: tuple[str, ...] | str = ()
    """Trackers that get the metrics in addition to `metrics.jsonl`: trackio, wandb, tensorboard. A text with
    commas between the names is read as these names, and `none` as no tracker."""

    def __post_init__(self) -> None:
        if isinstance(self.report_to, str):
            names = [name.strip() for name in self.report_to.split(",")]
            object.__setattr__(self, "report_to", tuple(name for name in names if name not in {"", "none"}))
        if isinstance(self.lora, Mapping):
            from agentenv.core.settings import build

            object.__setattr__(self, "lora", build(LoraOptions, self.lora))
        check_fields(self)
        self._check_fsdp()
        self._check_unread()
        self._check_clips()
        self._check_compile()
        self._check_reduction()
        self._check_kl_weights()
        self._check_teacher()
        if self.num_generations_eval > 1 and not self.eval_temperature:
            raise UsageError(
                f"num_generations_eval={self.num_generations_eval} would play each held-out task several "
                "times with the same tokens, because eval_temperature is 0",
                remedy="set eval_temperature above 0, for example to 1",
            )
        self._check_stream()

    def _check_unread(self) -> None:
        for option in fields(self):
            value, losses = getattr(self, option.name), READ_BY.get(option.name)
            if losses is not None and value != option.default and self.loss_type not in losses:
                raise UsageError(
                    f"{option.name}={value:g} has no effect with loss_type={self.loss_type!r}",
                    remedy=f"leave it out; it is for {', '.join(sorted(losses))}",
                )
        if self.use_bias_correction_kl and (self.kl_in == "reward" or not self.beta):
            raise UsageError(
                "use_bias_correction_kl has no effect without a KL term in the loss",
                remedy="set beta above 0 and kl_in='loss', or leave it out",
            )
        if 0 < self.max_steps < self.warmup_steps:
            raise UsageError(
                f"warmup_steps={self.warmup_steps} is more than max_steps={self.max_steps}, so the learning "
                "rate would never reach its full value",
                remedy="set fewer warmup_steps, or as many max_steps as the run has",
            )
        if self.loss_type == "gpg" and self.num_iterations > 1:
            raise UsageError(
                f"loss_type='gpg' has no importance ratio, so with num_iterations={self.num_iterations} "
                "nothing would correct for the weights that changed since the episodes were sampled",
                remedy="set num_iterations=1, or use a loss with a ratio such as dapo or cispo",
            )

    def _check_teacher(self) -> None:
        distills = self.loss_type == "distill"
        if distills and not self.teacher:
            raise UsageError("loss_type='distill' needs a teacher", remedy="set teacher to a model")
        if self.teacher and not distills and not self.beta:
            raise UsageError(
                f"teacher={self.teacher!r} has no effect",
                remedy="set loss_type='distill', or beta above 0",
            )
        if self.teacher_is_served and self.temperature != 1:
            raise UsageError(
                f"the teacher {self.teacher} scores at temperature 1, not at {self.temperature:g}",
                remedy="set temperature=1, or name the directory of the teacher",
            )
        if self.teacher_is_served and self.is_cut:
            raise UsageError(
                f"the teacher {self.teacher} scores tokens among its whole vocabulary, which cannot be "
                "compared with those of a cut distribution (top_p, top_k or min_p)",
                remedy="leave out top_p, top_k and min_p, or name the directory of the teacher",
            )

    @property
    def is_cut(self) -> bool:
        """Whether tokens are sampled from a cut distribution, and trained on their supports."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def teacher_is_served(self) -> bool:
        """Whether the teacher is on servers, and not in the trainer's process."""
        return self.teacher.startswith(("http://", "https://"))

    def _check_kl_weights(self) -> None:
        for weight in self.kl_weights:
            if not 0 <= weight < inf:
                raise UsageError(f"kl_weights must be finite and 0 or more, not {weight}")
        if self.kl_weights and not self.beta:
            raise UsageError(
                f"kl_weights={self.kl_weights} has no effect with beta=0, which they multiply",
                remedy="set beta above 0, or leave kl_weights out",
            )

    def _check_stream(self) -> None:
        if not self.max_ahead:
            return
        if self.loss_type == "gpg" and self.proximal == "sampler":
            raise UsageError(
                f"loss_type='gpg' has no importance ratio, so with max_ahead={self.max_ahead} nothing would "
                "correct for the older weights that sampled the episodes",
                remedy="set old_logprobs='recompute', or use a loss with a ratio such as dapo or cispo",
            )

    def _check_fsdp(self) -> None:
        kind: type = type(self.fsdp)
        if kind is not bool and (kind is not int or self.fsdp < 2):
            raise UsageError(
                f"fsdp must be true, false or the number of processes that share a copy of the model, at "
                f"least 2, not {self.fsdp!r}",
                remedy="set true to share one copy among all processes, and false to give each its own",
            )

    def _check_compile(self) -> None:
        watched = {"router_aux_loss_coef": self.router_aux_loss_coef, "router_replay": self.router_replay}
        for name, value in watched.items() if self.torch_compile else ():
            if value:
                raise UsageError(
                    f"torch_compile=True cannot be combined with {name}={value!r}, which watches the routers",
                    remedy="leave out one of the two",
                )

    def _check_clips(self) -> None:
        high = 1 + self.clip[1]
        if self.delta is not None and self.delta <= high:
            raise UsageError(f"delta must be above 1 + epsilon_high = {high}, not {self.delta}")
        if self.importance_correction not in (None, "off") and self.proximal == "sampler":
            raise UsageError(
                f"importance_correction={self.importance_correction!r} has no effect with "
                "old_logprobs='sampler': the old logprobs are then those of the sampler",
                remedy="set old_logprobs='recompute'",
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

    def shard_size(self, processes: int) -> int:
        """Return how many of so many processes share a copy of the model; 1 if each has its own.

        Raises:
            UsageError: The processes cannot be divided into groups of `fsdp`.
        """
        if isinstance(self.fsdp, bool):
            return processes if self.fsdp else 1
        if processes % self.fsdp:
            raise UsageError(
                f"fsdp={self.fsdp} cannot divide {processes} training process{'es' * (processes > 1)} into "
                f"groups of {self.fsdp}",
                remedy="set fsdp to a number that divides the number of processes, or to true",
            )
        return self.fsdp

    @property
    def plays_ahead(self) -> bool:
        """Whether episodes are played while a batch trains."""
        return self.max_ahead > 0

    @property
    def clip(self) -> tuple[float, float]:
        """`epsilon` and `epsilon_high`, or the defaults for the loss and the ratio's level."""
        low, high = (0.2, 0.2) if self.loss_type == "dppo" else (0.2, 0.28)
        if self.importance_sampling_level == "sequence":
            low, high = 3e-4, 4e-4
        return (
            low if self.epsilon is None else self.epsilon,
            high if self.epsilon_high is None else self.epsilon_high,
        )

    @property
    def proximal(self) -> Literal["sampler", "recompute"]:
        """Whose logprobs the proximal policy has: `old_logprobs`, or the default for the run."""
        differs = bool(self.engine) and not self.plays_ahead
        recompute = self.importance_sampling_level == "sequence" or differs
        return self.old_logprobs or ("recompute" if recompute else "sampler")

    @property
    def correction(self) -> str:
        """The importance correction that is used: `importance_correction`, or the default for the run."""
        differs = (bool(self.engine) or self.plays_ahead) and self.proximal == "recompute"
        return self.importance_correction or ("token_truncate" if differs else "off")

    @property
    def trains_zero_std(self) -> bool:
        """Whether groups without spread have a gradient: not from their advantages, which are all 0."""
        in_loss = bool(self.beta) and self.kl_in == "loss"
        return self.loss_type == "distill" or in_loss or bool(self.entropy_coef)

    @property
    def scheme(self) -> Reduction:
        """The reduction that is used: `reduction`, or that of the loss type."""
        return self.reduction or REDUCTION_OF[self.loss_type]


def refuse_groups_of_one(config: GRPOConfig) -> None:
    """Refuse groups of one episode, which has no other episode to be compared with.

    Raises:
        UsageError: `num_generations` is 1.
    """
    if config.num_generations == 1 and config.loss_type != "distill":
        raise UsageError(
            "num_generations=1 (-k 1) can never train: advantages compare the episodes of one task",
            remedy="use 2 or more, or pass an advantage_fn of your own to GRPOTrainer",
        )


def refuse_reward_options(config: GRPOConfig) -> None:
    """Refuse options that change rewards, which advantages of the user's own do not see.

    Raises:
        UsageError: An option would have no effect.
    """
    unused = {
        "overlong_penalty_tokens": bool(config.overlong_penalty_tokens),
        "kl_in='reward'": bool(config.beta) and config.kl_in == "reward",
    }
    for option, is_set in unused.items():
        if is_set:
            raise UsageError(
                f"{option} has no effect with an advantage_fn, whose advantages replace those of the rewards",
                remedy="leave the option out and apply it in the function",
            )
