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

__all__ = ["default_learning_rate", "with_learning_rate"]

_WIDTH = 5120
_LOW, _HIGH = 1e-6, 1e-5
_LORA = 10


def default_learning_rate(width: int, *, lora: bool) -> float:
    """Return the learning rate for a model with this many hidden units."""
    rate = min(_HIGH, max(_LOW, _LOW * _WIDTH / width))
    return float(f"{rate * (_LORA if lora else 1):.2g}")


def with_learning_rate(config: GRPOConfig, model: Any | None) -> GRPOConfig:
    """Return the options with a learning rate; one that is set stays.

    Args:
        config: the options.
        model: the model; None for one at a server, which may have any width and is trained by LoRA.
    """
    if config.optimizer.learning_rate is not None:
        return config
    if model is None:
        return replace(config, learning_rate=default_learning_rate(_WIDTH, lora=True))
    width = getattr(model.config.get_text_config(), "hidden_size", _WIDTH)
    lora = config.lora is not None or hasattr(model, "peft_config")
    return replace(config, learning_rate=default_learning_rate(width, lora=lora))
