"""Tiny mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentenv.core import RoutedExperts
from agentenv.training.rows import Row
from helpers.training import make_row

EXPERTS, CHOSEN = 6, 2
PROMPT = 4
"""Number of tokens that rows have in common."""
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "num_experts_per_tok": CHOSEN,
}
KINDS = {
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": EXPERTS, "head_dim": 8}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True},
    ),
    "gpt-oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 16},
    ),
    # Its routers choose by sigmoids and a bias, among the experts of two of three groups; the first layer has
    # no router.
    "deepseek-v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": 16,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}


def tiny_moe(kind: str = "qwen3-moe", seed: int = 0, dtype: torch.dtype = torch.float64, **options):
    config, model, own = KINDS[kind]
    torch.manual_seed(seed)
    made = model(config(**{**SIZES, **own, **options}))
    if dtype == torch.float64:  # the grouped products of the other implementation have no float64
        made.set_experts_implementation("eager")
    for name, parameter in made.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            torch.nn.init.normal_(parameter, std=0.5)
    return made.to(dtype).eval()


def rows_with_experts(*lengths: int, layers: int = 3, wide: bool = False) -> list[Row]:
    """Return rows with a common prompt, and the same experts for it, but others after it."""
    draw, numbers = torch.Generator().manual_seed(1), np.random.default_rng(2)
    shared = torch.randint(0, 61, (PROMPT,), generator=draw).tolist()
    experts = _drawn(numbers, PROMPT, layers)
    rows = []
    for number, length in enumerate(lengths):
        ids = [*shared, number, *torch.randint(0, 61, (length,), generator=draw).tolist()]
        row = make_row(ids, list(range(PROMPT, len(ids))), group=number, weight=0.1 * (number + 1))
        own = np.concatenate([experts, _drawn(numbers, len(ids) - 1 - PROMPT, layers)])
        rows.append(replace(row, routed_experts=RoutedExperts.of(own.astype("uint16" if wide else "uint8"))))
    return rows


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """Return the gradient of a model in one tensor, and take it away."""
    found = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
    model.zero_grad(set_to_none=True)
    return torch.cat([one.to_dense().flatten() if one.is_sparse else one.flatten() for one in found])


def _drawn(numbers, tokens: int, layers: int) -> np.ndarray:
    """Return different experts for each token and layer, as a router chooses them."""
    return numbers.permuted(np.tile(np.arange(EXPERTS), (tokens, layers, 1)), axis=-1)[..., :CHOSEN]
