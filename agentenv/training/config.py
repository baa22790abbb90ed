"""The options of a training run: one frozen dataclass that uses TRL's names where TRL has the option.

Options of one subject are in a dataclass of their own (`agentenv.training.options`), and each checks itself.
Options of two subjects that exclude each other are checked here, where they meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Unpack

from agentenv.core.errors import UsageError
from agentenv.core.fields import TABLE, NonNegativeInt, PositiveInt, check_fields, takes_flat_names
from agentenv.training.options.evaluation import EvaluationOptions
from agentenv.training.options.lora import LoraOptions
from agentenv.training.options.loss import LossOptions
from agentenv.training.options.optimizer import OptimizerOptions
from agentenv.training.options.sampling import SamplingOptions
from agentenv.training.options.stream import StreamOptions

if TYPE_CHECKING:
    from agentenv.training.settings import ConfigSettings

__all__ = ["GRPOConfig", "refuse_groups_of_one", "refuse_reward_options"]


@takes_flat_names
@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """Options of a GRPO run.

    The options of a table may be given by their own names: `GRPOConfig(epsilon=0.1)` is
    `GRPOConfig(loss=LossOptions(epsilon=0.1))`.

    Raises:
        UsageError: A value is outside its range, or two options exclude each other.
    """

    model: str = ""
    """Path or Hub id of a causal language model, or a .gguf file."""
    engine: str = ""
    """Engine that generates episodes: vLLM servers (`http://HOST:PORT/v1`, `servers:FILE`) or `vllm:PATH`;
    empty means the trained model."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions, metadata=TABLE)
    """What one step samples."""
    loss: LossOptions = field(default_factory=LossOptions, metadata=TABLE)
    """The loss and the advantages."""
    stream: StreamOptions = field(default_factory=StreamOptions, metadata=TABLE)
    """How far episodes are played ahead, and what corrects for the policy that sampled them."""
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions, metadata=TABLE)
    """The optimiser and the schedule of its learning rate."""
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions, metadata=TABLE)
    """When and how the held-out tasks are played."""

    # The run
    max_steps: NonNegativeInt = 20
    """Number of training steps of the whole run."""
    num_iterations: PositiveInt = 1
    """Number of passes over the same batch. More than 1 makes the later updates off-policy."""
    num_minibatches: PositiveInt = 1
    """Number of optimiser steps in one pass. A group is never split between them."""
    seed: int = 0
    """Seed of the tasks' order, the episodes and what is random in the training."""
    demo_min_reward: float | None = None
    """Least reward of a demonstration that the warm-up of `ae.train` imitates. None takes any of a policy,
    and refuses an oracle that earns less than the full marks."""
    output_dir: str = "runs/train"
    """Directory that `metrics.jsonl` and `checkpoints/` are written to."""
    save_steps: NonNegativeInt = 0
    """Number of steps between checkpoints; 0 saves none in between. The last step is always saved."""
    save_total_limit: NonNegativeInt | None = None
    """Number of checkpoints to keep, the newest and at least one; None keeps all."""
    report_to: tuple[str, ...] | str = ()
    """Trackers that get the metrics in addition to `metrics.jsonl`: trackio, wandb, tensorboard. A text with
    commas between the names is read as these names, and `none` as no tracker."""

    # Where episodes are played
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

    # What is trained, and how it is computed
    lora: LoraOptions | None = None
    """Train LoRA adapters with these options; None trains all weights."""
    train_vision: bool = False
    """Whether the vision tower of a model that sees is trained, too; LoRA trains the language model only."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Number format of the weights. `auto` is bfloat16 on a GPU and float32 on a CPU, where models are small
    and runs short: bfloat16 rounds most small changes of a weight away. With LoRA the base is bfloat16
    wherever the device multiplies it fast. The optimiser keeps float32 masters of bfloat16 weights."""
    device: str = "auto"
    """Device of the model, such as `cuda:1`; `auto` is a GPU where there is one, and otherwise the CPU."""
    packing: Literal["auto", "shared", "padded"] = "auto"
    """Layout of the rows in a forward pass: `shared` packs them with shared prefixes and `padded` pads them.
    `auto` packs if a check at the start found packing exact for the model and it costs less."""
    tokens_per_micro_batch: PositiveInt | None = None
    """Largest number of tokens in one forward pass. A longer row gets a pass of its own. None means 4,096 for
    each 20 GB of a GPU, at most 16,384, and 4,096 for shards and on a CPU. Where memory runs out, half as
    many are tried."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: at most half their memory for a quarter more time."""
    fsdp: bool | int = False
    """Under torchrun, shard the model over the ranks (FSDP2) instead of replicating it. With a number, each
    copy of the model is sharded over so many neighbouring ranks, such as those of one machine, and the copies
    are replicas of each other (HSDP). The trainer then needs a separate engine: a server, or one on a copy of
    the model in each process."""

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[ConfigSettings]) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.report_to, str):
            names = [name.strip() for name in self.report_to.split(",")]
            object.__setattr__(self, "report_to", tuple(name for name in names if name not in {"", "none"}))
        if isinstance(self.lora, Mapping):
            from agentenv.core.settings import build

            object.__setattr__(self, "lora", build(LoraOptions, self.lora))
        check_fields(self)
        self._check_fsdp()
        self._check_schedule()
        self._check_served_teacher()
        self._check_correction()

    def _check_schedule(self) -> None:
        warmup_steps = self.optimizer.warmup_steps
        if 0 < self.max_steps < warmup_steps:
            raise UsageError(
                f"warmup_steps={warmup_steps} is more than max_steps={self.max_steps}, so the learning "
                "rate would never reach its full value",
                remedy="set fewer warmup_steps, or as many max_steps as the run has",
            )

    def _check_served_teacher(self) -> None:
        loss, sampling = self.loss, self.sampling
        if loss.teacher_is_served and sampling.temperature != 1:
            raise UsageError(
                f"the teacher {loss.teacher} scores at temperature 1, not at {sampling.temperature:g}",
                remedy="set temperature=1, or name the directory of the teacher",
            )
        if loss.teacher_is_served and sampling.is_cut:
            raise UsageError(
                f"the teacher {loss.teacher} scores tokens among its whole vocabulary, which cannot be "
                "compared with those of a cut distribution (top_p, top_k or min_p)",
                remedy="leave out top_p, top_k and min_p, or name the directory of the teacher",
            )

    def _check_correction(self) -> None:
        """Refuse what nothing would correct for, and a correction that corrects for nothing."""
        if self.loss.loss_type == "gpg":
            ahead, iterations = self.stream.max_ahead, self.num_iterations
            if iterations > 1:
                raise UsageError(
                    f"loss_type='gpg' has no importance ratio, so with num_iterations={iterations} "
                    "nothing would correct for the weights that changed since the episodes were sampled",
                    remedy="set num_iterations=1, or use a loss with a ratio such as dapo or cispo",
                )
            if ahead and self.proximal == "sampler":
                raise UsageError(
                    f"loss_type='gpg' has no importance ratio, so with max_ahead={ahead} nothing would "
                    "correct for the older weights that sampled the episodes",
                    remedy="set old_logprobs='recompute', or use a loss with a ratio such as dapo or cispo",
                )
        correction = self.stream.importance_correction
        if correction not in (None, "off") and self.proximal == "sampler":
            raise UsageError(
                f"importance_correction={correction!r} has no effect with "
                "old_logprobs='sampler': the old logprobs are then those of the sampler",
                remedy="set old_logprobs='recompute'",
            )

    def _check_fsdp(self) -> None:
        kind: type = type(self.fsdp)
        if kind is not bool and (kind is not int or self.fsdp < 2):
            raise UsageError(
                f"fsdp must be true, false or the number of processes that share a copy of the model, at "
                f"least 2, not {self.fsdp!r}",
                remedy="set true to share one copy among all processes, and false to give each its own",
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
    def base_rate(self) -> float:
        """The learning rate before any schedule; that of a wide model if none is set."""
        return 1e-6 if self.optimizer.learning_rate is None else self.optimizer.learning_rate

    @property
    def plays_ahead(self) -> bool:
        """Whether episodes are played while a batch trains."""
        return self.stream.max_ahead > 0

    @property
    def proximal(self) -> Literal["sampler", "recompute"]:
        """Whose logprobs the proximal policy has: `old_logprobs`, or the default for the run."""
        differs = bool(self.engine) and not self.plays_ahead
        recompute = self.loss.importance_sampling_level == "sequence" or differs
        return self.stream.old_logprobs or ("recompute" if recompute else "sampler")

    @property
    def correction(self) -> str:
        """The importance correction that is used: `importance_correction`, or the default for the run."""
        differs = (bool(self.engine) or self.plays_ahead) and self.proximal == "recompute"
        return self.stream.importance_correction or ("token_truncate" if differs else "off")


def refuse_groups_of_one(config: GRPOConfig) -> None:
    """Refuse groups of one episode, which has no other episode to be compared with.

    Raises:
        UsageError: `num_generations` is 1.
    """
    if config.sampling.num_generations == 1 and config.loss.loss_type != "distill":
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
        "overlong_penalty_tokens": bool(config.loss.overlong_penalty_tokens),
        "kl_in='reward'": config.loss.has_kl and config.loss.kl_in == "reward",
    }
    for option, is_set in unused.items():
        if is_set:
            raise UsageError(
                f"{option} has no effect with an advantage_fn, whose advantages replace those of the rewards",
                remedy="leave the option out and apply it in the function",
            )
