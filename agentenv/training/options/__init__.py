"""The options of a training by subject, each checked by itself; `GRPOConfig` joins them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.training.options.evaluation import EvaluationOptions as EvaluationOptions
    from agentenv.training.options.lora import LoraOptions as LoraOptions
    from agentenv.training.options.loss import LossOptions as LossOptions
    from agentenv.training.options.optimizer import OptimizerOptions as OptimizerOptions
    from agentenv.training.options.sampling import SamplingOptions as SamplingOptions
    from agentenv.training.options.stream import StreamOptions as StreamOptions

__all__ = door(__name__)
