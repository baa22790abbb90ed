"""The settings of `train` for checkers of types and editors; `GRPOConfig` explains and checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from agentenv.training.options.evaluation import EvaluationOptions
from agentenv.training.options.lora import LoraOptions
from agentenv.training.options.loss import LossOptions, LossType, Reduction
from agentenv.training.options.optimizer import OptimizerOptions
from agentenv.training.options.sampling import SamplingOptions
from agentenv.training.options.stream import StreamOptions

__all__ = ["ConfigSettings", "TrainSettings"]


class TrainSettings(TypedDict, total=False):
    """Fields of `GRPOConfig` that are not named arguments of `train`."""

    sampling: SamplingOptions | Mapping[str, Any]
    loss: LossOptions | Mapping[str, Any]
    stream: StreamOptions | Mapping[str, Any]
    optimizer: OptimizerOptions | Mapping[str, Any]
    evaluation: EvaluationOptions | Mapping[str, Any]
    workers: int
    ray: str
    worker_env: Sequence[str]
    ray_options: Mapping[str, Any]
    output_dir: str
    groups_per_step: int
    num_generations: int
    num_iterations: int
    num_minibatches: int
    max_steps: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: Sequence[str]
    refill_rounds: int
    mask_truncated_completions: bool
    overlong_penalty_tokens: int
    max_completion_length: int | None
    loss_type: LossType
    teacher: str
    reduction: Reduction | None
    epsilon: float | None
    epsilon_high: float | None
    delta: float | None
    importance_sampling_level: Literal["token", "sequence"]
    scale_rewards: Literal["group", "batch", "none"]
    advantage: Literal["grpo", "rloo"]
    turn_discount: float | None
    beta: float | Sequence[float]
    kl_estimator: Literal["k1", "k2", "k3"]
    kl_in: Literal["loss", "reward"]
    use_bias_correction_kl: bool
    entropy_coef: float
    router_aux_loss_coef: float
    demo_min_reward: float | None
    old_logprobs: Literal["sampler", "recompute"] | None
    importance_correction: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off"] | None
    )
    importance_cap: float
    router_replay: bool
    off_policy_mask_threshold: float | None
    optim: str
    learning_rate: float | None
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    optimizer_offload: bool
    train_vision: bool
    lora: LoraOptions | Mapping[str, Any] | None
    dtype: Literal["auto", "float32", "bfloat16", "float64"]
    device: str
    packing: Literal["auto", "shared", "padded"]
    tokens_per_micro_batch: int | None
    gradient_checkpointing: bool
    fsdp: bool | int
    max_ahead: int
    eval_steps: int
    eval_on_start: bool
    eval_tasks: int
    eval_temperature: float
    num_generations_eval: int
    save_steps: int
    save_total_limit: int | None
    report_to: Sequence[str] | str


class ConfigSettings(TrainSettings, total=False):
    """Fields of `GRPOConfig`."""

    model: str
    engine: str
    seed: int
