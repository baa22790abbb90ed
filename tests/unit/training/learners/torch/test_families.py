"""Kinds of models that need care: their limits, their attention, and what depends on neighbouring rows."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Mamba2Config,
    NemotronHConfig,
    Zamba2Config,
)

from agentenv.core import TrajectoryGroup, UsageError
from agentenv.engine import Sampling, TransformersEngine
from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import Policy, pack_rows
from agentenv.training.learners.torch import check as check_module
from agentenv.training.learners.torch.packing import pad_rows
from helpers.rope import MODELS, SHAPE
from helpers.training import episode, group, make_row, tiny, trainer_of


def row_of(length: int, seed: int):
    ids = torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return make_row([1, 2, 3, *ids], list(range(4, length + 3)))


@pytest.mark.parametrize("kind", MODELS)
def test_rows_beyond_the_original_length_change_no_other_row(kind):
    policy = trainer_of(MODELS[kind]()).learner.policy
    rows = [row_of(20, 0), row_of(90, 1), row_of(25, 2)]

    alone = torch.cat([policy.score(pad_rows([row]))[0] for row in rows])

    assert policy.max_length == 128
    assert policy.packable
    torch.testing.assert_close(policy.score(pad_rows(rows))[0], alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(policy.score(pack_rows(rows))[0], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_the_check_at_the_start_finds_numbers_that_depend_on_the_longest_row(kind):
    with pytest.raises(UsageError, match="depend on the longest row"):
        Policy(MODELS[kind](), GRPOConfig()).check()


def test_a_context_that_yarn_extends_takes_its_rows():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    trainer = trainer_of(tiny(max_position_embeddings=40, rope_parameters=rope))
    assert trainer.learner.policy.max_length == 128

    long = TrajectoryGroup(tuple(episode("long", n, float(n), tokens=80) for n in range(2)))
    metrics = trainer.step([long])

    assert "dropped/rows_too_long" not in metrics
    assert metrics["updates"] == 1


def gemma2(attention: str | None = None) -> Gemma2ForCausalLM:
    """Return a tiny Gemma 2; without a name, with the attention that transformers chooses (sdpa before 5.23)."""
    config = Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=2.0, sliding_window=8)
    torch.manual_seed(0)
    model = Gemma2ForCausalLM._from_config(config, attn_implementation=attention)
    return model.double().eval()


def scores_of(model, row) -> torch.Tensor:
    """Score the trained tokens of a row with one plain forward pass."""
    ids = torch.tensor([row.token_ids])
    log_p = model(ids).logits[0].log_softmax(-1)
    return log_p[row.positions_n - 1].gather(1, ids[0, row.positions_n, None])[:, 0]


def test_a_cap_of_the_attention_scores_is_applied_in_training():
    row = row_of(30, 0)
    truth = scores_of(gemma2("eager"), row)

    policy = trainer_of(gemma2()).learner.policy

    torch.testing.assert_close(policy.score(pad_rows([row]))[0], truth, rtol=0, atol=1e-6)


async def test_a_cap_of_the_attention_scores_is_applied_when_sampling():
    eager, model = gemma2("eager").float(), gemma2().float()
    engine = TransformersEngine(model)
    prompt = row_of(20, 0).token_ids

    answer = await engine.generate(prompt, Sampling(max_tokens=12, seed=0), stop_token_ids=[])

    ids = torch.tensor([[*prompt, *answer.token_ids]])
    with torch.no_grad():
        truth = eager(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    expected = truth.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0].tolist()
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)
    await engine.close()


@pytest.mark.skipif(not Gemma2ForCausalLM._supports_sdpa, reason="transformers refuses sdpa itself")
def test_an_attention_that_ignores_the_cap_is_refused_in_words():
    row = row_of(30, 0)
    assert (scores_of(gemma2("sdpa"), row) - scores_of(gemma2("eager"), row)).abs().mean() > 0.02

    with pytest.raises(UsageError, match="'sdpa' ignores the soft cap"):
        Policy(gemma2("sdpa"), GRPOConfig())


def test_a_model_without_sdpa_is_not_told_to_load_with_it():
    moe = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = GptOssConfig(**SHAPE, **moe, head_dim=8, sliding_window=8, max_position_embeddings=64)
    torch.manual_seed(0)
    findings = Policy(GptOssForCausalLM(config).eval(), GRPOConfig()).check()
    plain = tiny()
    plain.set_attn_implementation("eager")

    assert len(findings) == 1
    assert "rows are padded, not packed: eager attention" in findings[0]
    assert "sdpa" not in findings[0]
    assert Policy(plain, GRPOConfig()).pack_reason.endswith("; load the model with sdpa")


def test_llama4_is_a_causal_language_model():
    own = {"intermediate_size_mlp": 48, "head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 16}
    own |= {"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.02}
    config = Llama4TextConfig(**{**SHAPE, **own})
    torch.manual_seed(0)
    model = Llama4ForCausalLM(config).double().eval()
    trainer = trainer_of(model, learning_rate=1e-3)
    row = row_of(20, 0)

    scored, _ = trainer.learner.policy.score(pad_rows([row]))

    torch.testing.assert_close(scored, scores_of(model, row), rtol=0, atol=1e-6)
    assert trainer.step([group("a", [0.0, 1.0])])["updates"] == 1


class Mixing(torch.nn.Module):
    """Adds to each token a share of the one before it, as a convolution over the sequence does."""

    def __init__(self, inner: torch.nn.Module, share: float) -> None:
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        return self.inner(hidden + self.share * before)


@pytest.mark.parametrize("share", [0.03, 0.1])
def test_a_small_leak_between_rows_is_found_in_a_large_model_of_low_precision(monkeypatch, share):
    monkeypatch.setattr(check_module, "MAX_CHECK_PARAMETERS", 0)
    model = tiny(dtype=torch.bfloat16, initializer_range=0.1)
    assert Policy(model, GRPOConfig()).check() == []
    model.model.layers[0].mlp = Mixing(model.model.layers[0].mlp, share)
    policy = Policy(model, GRPOConfig())

    findings = policy.check()

    assert not policy.packable
    assert "the rows packed beside a row change its gradients by" in findings[0]


def test_kernels_that_are_wrong_in_the_models_own_format_are_found():
    model = tiny(dtype=torch.bfloat16, initializer_range=0.1)

    def spoil(module, args, output):
        packed = output.shape[0] == 1 and output.dtype == torch.bfloat16
        return output * 1.5 if packed else output

    model.model.layers[0].mlp.register_forward_hook(spoil)
    policy = Policy(model, GRPOConfig())

    assert "packed gradients are off" in policy.check()[0]
    assert not policy.packable


# Families with layers of another kind than attention train a step on the CPU --------------


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
