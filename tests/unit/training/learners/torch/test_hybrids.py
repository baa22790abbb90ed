"""Families with layers of another kind than attention train a step on the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    GraniteMoeHybridConfig,
    Mamba2Config,
    NemotronHConfig,
    Zamba2Config,
)

from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import Policy
from agentenv.training.learners.torch.packing import pad_rows
from helpers.training import group, make_row, trainer_of

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "intermediate_size": 48,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
CONFIGS = {
    "mamba2": Mamba2Config(
        vocab_size=61, hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=1, num_hidden_layers=2
    ),
    "bamba": BambaConfig(**SIZES, **MAMBA, num_hidden_layers=2, attn_layer_indices=[1]),
    "granite-moe-hybrid": GraniteMoeHybridConfig(
        **SIZES, **MAMBA, num_hidden_layers=2, layer_types=["mamba", "attention"], num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=32,
    ),
    "zamba2": Zamba2Config(
        **SIZES, num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "mamba"], n_mamba_heads=4,
        mamba_d_state=8, mamba_ngroups=1, chunk_size=8, num_mem_blocks=1, use_mem_rope=True,
    ),
    "nemotron-h": NemotronHConfig(
        **SIZES, layers_block_type=["mamba", "attention", "mlp"], head_dim=8, mamba_num_heads=4,
        mamba_head_dim=16, ssm_state_size=8, n_groups=1, chunk_size=8,
    ),
}  # fmt: skip


def model_of(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_hybrid_models_are_those_of_the_plain_model_and_they_train_a_step(name):
    rows = [make_row(list(range(1, 1 + length)), [4, 5, length - 1]) for length in (9, 14)]
    policy, plain = Policy(model_of(CONFIGS[name]), GRPOConfig()), model_of(CONFIGS[name])

    policy.score(pad_rows(rows))[0].sum().backward()
    for row in rows:
        log_p = plain(torch.tensor([row.token_ids[:-1]])).logits[0].log_softmax(-1)
        log_p[row.positions_n - 1, torch.tensor(row.token_ids)[row.positions_n]].sum().backward()

    truth = {name: weight.grad for name, weight in plain.named_parameters()}
    assert max(float(gradient.abs().max()) for gradient in truth.values() if gradient is not None) > 0
    for weight, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter.grad, truth[weight], rtol=1e-4, atol=1e-5)
    assert trainer_of(plain, dtype="float32").step([group("t", [0.0, 1.0])])["updates"] == 1
