"""Heads of ten families: exact log-probabilities and gradients, without the logits of all positions."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import Policy
from agentenv.training.learners.torch.packing import pad_rows
from helpers.training import make_row

VOCABULARY, LENGTH = 20_000, 200
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
FAMILIES = {
    "llama": (hf.LlamaConfig, {}),
    "granite": (hf.GraniteConfig, {"logits_scaling": 7.0}),
    "granite with experts": (hf.GraniteMoeConfig, {"logits_scaling": 7.0, **MOE}),
    "cohere": (hf.CohereConfig, {"logit_scale": 0.3}),
    "cohere 2": (hf.Cohere2Config, {"logit_scale": 0.3}),
    "falcon h1": (hf.FalconH1Config, {"lm_head_multiplier": 0.2, **MAMBA}),
    "phi": (hf.PhiConfig, {}),
    "gptj": (hf.GPTJConfig, {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}),
    "gemma 2": (hf.Gemma2Config, {"final_logit_softcapping": 3.0}),
    "gemma 3": (hf.Gemma3TextConfig, {"final_logit_softcapping": 3.0}),
}
ADAPTERS = {
    "lora": {"target_modules": ["q_proj", "lm_head"]},
    "a trained copy": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def model_of(family: str):
    kind, options = FAMILIES[family]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(kind(**SHAPE, **options), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name == "lm_head.bias":
            torch.nn.init.normal_(parameter)
    return model.eval()


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that anything computes."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [one.numel() * one.itemsize for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
        self.num_bytes = max(self.num_bytes, *sizes, 0)
        return made


def rows():
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    return [make_row(ids[0], list(range(LENGTH - 8, LENGTH))), make_row(ids[1], list(range(20, 28)))]


def truth_of(model, policy):
    values = []
    for row in rows():
        logits = model(torch.tensor([row.token_ids]), use_cache=False).logits[0] / policy.temperature
        scores = logits.float().log_softmax(-1)[row.positions_n - 1]
        values.append(scores.gather(1, torch.tensor(row.token_ids)[row.positions_n, None])[:, 0])
    return torch.cat(values)


def check_head(model):
    policy = Policy(model, GRPOConfig(temperature=0.8))
    trained = [one for one in model.parameters() if one.requires_grad]
    weights = torch.linspace(-1, 1, 16)

    with Largest() as largest:
        logprobs, _ = policy.score(pad_rows(rows()))
        grads = torch.autograd.grad((weights * logprobs).sum(), trained)

    truth = truth_of(model, policy)
    wanted = torch.autograd.grad((weights * truth).sum(), trained)
    torch.testing.assert_close(logprobs, truth, rtol=0, atol=2e-5)
    for ours, theirs in zip(grads, wanted, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-6
    all_logits = 2 * LENGTH * VOCABULARY * 4
    assert largest.num_bytes <= all_logits / 8, f"{largest.num_bytes / all_logits:.2f} of all logits"
    return policy


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_of_a_family_needs_no_logits_of_all_positions(family):
    policy = check_head(model_of(family))

    assert policy.head_way == "matrix"


@pytest.mark.parametrize("adapters", ADAPTERS)
def test_adapters_on_the_head_need_no_logits_of_all_positions(adapters):
    model = get_peft_model(model_of("granite"), LoraConfig(r=2, **ADAPTERS[adapters]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)

    policy = check_head(model.eval())

    assert policy.head_way == "own"


class Scaled(hf.LlamaForCausalLM):
    """Changes what its decoder is given, which a pass of the decoder alone leaves out."""

    def forward(self, input_ids=None, **options):
        return super().forward(inputs_embeds=2 * self.get_input_embeddings()(input_ids), **options)


def test_a_model_that_changes_the_inputs_of_its_decoder_computes_everything_itself():
    torch.manual_seed(0)
    policy = Policy(Scaled(hf.LlamaConfig(**SHAPE)).eval(), GRPOConfig(temperature=0.8))

    findings = policy.check()

    assert policy.head_way == "whole"
    assert "takes memory for each of them" in findings[0]
    scored = policy.score(pad_rows(rows()))[0]
    torch.testing.assert_close(scored, truth_of(policy.model, policy), rtol=0, atol=2e-5)
