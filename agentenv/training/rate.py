"""The learning rate of a training that names none.

Steps of Adam that suit a model get smaller as it gets wider, in inverse proportion (Yang et al., Tensor
Programs V, arXiv 2203.03466, table 3). The rule is anchored where GRPO of all weights is published: 1e-6 for
a width of 5120 (DAPO, arXiv 2503.14476, on Qwen2.5-32B), which is also the lower bound; 1e-5 is the upper
one. LoRA takes ten times as much, at every size and for reinforcement learning too (Schulman et al., LoRA
Without Regret, Thinking Machines, 2025).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentenv.training.config import GRPOConfig

__all__ = ["default_learning_rate", "default_rate", "with_learning_rate"]

_WIDTH = 5120
_LOW, _HIGH = 1e-6, 1e-5
_LORA = 10
_WARMUP = 5.6
"""How much more a warm-up on demonstrations takes: 5e-5 for SmolLM2-135M, as measured with `make demo`."""


def default_learning_rate(width: int, *, lora: bool, warmup: bool = False) -> float:
    """Return the learning rate for a model with this many hidden units."""
    rate = min(_HIGH, max(_LOW, _LOW * _WIDTH / width))
    return float(f"{rate * (_LORA if lora else 1) * (_WARMUP if warmup else 1):.2g}")


def default_rate(config: GRPOConfig, model: Any | None, *, warmup: bool = False) -> float:
    """Return the learning rate for a model, whatever rate the options have.

    Args:
        config: the options, which say whether the model gets an adapter.
        model: the model; None for one at a server, which may have any width and is trained by LoRA.
        warmup: whether it is the rate of a warm-up on demonstrations.
    """
    if model is None:
        return default_learning_rate(_WIDTH, lora=True, warmup=warmup)
    width = getattr(model.config.get_text_config(), "hidden_size", _WIDTH)
    lora = config.lora is not None or hasattr(model, "peft_config")
    return default_learning_rate(width, lora=lora, warmup=warmup)


def with_learning_rate(config: GRPOConfig, model: Any | None) -> GRPOConfig:
    """Return the options with a learning rate; one that is set stays. The model is that of `default_rate`."""
    if config.optimizer.learning_rate is not None:
        return config
    return replace(config, learning_rate=default_rate(config, model))
