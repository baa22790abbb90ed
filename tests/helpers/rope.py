"""Tiny models whose position frequencies depend on the longest row of a forward pass."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

ORIGINAL = 32
"""Length up to which both models use the frequencies that they were first trained with."""
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def long_rope() -> PreTrainedModel:
    """Return a model of Phi-4-mini's kind: 32 positions at first, 128 with other frequencies."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 6.0, 12.0]}
    config = Phi3Config(
        **SHAPE,
        max_position_embeddings=128,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Phi3ForCausalLM(config).double().eval()


def dynamic_ntk() -> PreTrainedModel:
    """Return a Llama whose frequencies grow with every row beyond 32 tokens, up to 128."""
    rope = {"rope_type": "dynamic", "factor": 4.0}
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=ORIGINAL, rope_parameters=rope)
    return LlamaForCausalLM(config).double().eval()


MODELS = {"longrope": long_rope, "dynamic": dynamic_ntk}
