"""Layers that keep fewer activations compute the same numbers and gradients, and what they keep is counted."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from agentenv.placement.dry_run import MemoryTracker
from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import Policy, lean
from agentenv.training.learners.torch.lean import keep_less, recipes
from agentenv.training.learners.torch.packing import MicroBatch, pad_rows
from agentenv.training.rows import Row

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CONFIGS = {"llama": LlamaConfig(**SIZES), "qwen3": Qwen3Config(**SIZES)}


def model_of(config, dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand(weight.shape) + 0.5)
    return model


def gradients(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    ids = torch.arange(14).reshape(2, 7)
    logits = model(input_ids=ids, use_cache=False).logits
    logits.float().log_softmax(-1)[:, :, 3].sum().backward()
    return logits.detach(), [weight.grad for weight in model.parameters()]


def replaced(model: nn.Module) -> int:
    return sum("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("with_recipes", [False, True])
def test_logits_are_equal_and_gradients_agree_with_float64(name, with_recipes):
    model = model_of(CONFIGS[name])
    truth = gradients(copy.deepcopy(model).double())[1]
    plain_logits, plain = gradients(model)
    keep_less(model)

    if with_recipes:
        with recipes():
            logits, ours = gradients(model)
    else:
        logits, ours = gradients(model)

    assert replaced(model) == {"llama": 2 + 5, "qwen3": 2 + 9}[name]
    assert torch.equal(logits, plain_logits)
    for mine, theirs, right in zip(ours, plain, truth, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.double(), right, rtol=1e-3, atol=1e-4)


def test_gradients_of_bfloat16_are_as_near_to_the_truth_as_before():
    model = model_of(CONFIGS["llama"], torch.bfloat16)
    truth = torch.cat([one.flatten() for one in gradients(copy.deepcopy(model).float())[1]])

    def error() -> float:
        found = torch.cat([one.float().flatten() for one in gradients(model)[1]])
        return float((found - truth).norm() / truth.norm())

    before = error()
    keep_less(model)

    assert error() < 1.1 * before + 1e-3


def test_a_third_of_the_activations_is_not_kept():
    def kept(config: GRPOConfig) -> int:
        sizes: dict[int, int] = {}
        alive: list[torch.Tensor] = []

        def note(saved: torch.Tensor) -> torch.Tensor:
            sizes[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            alive.append(saved)
            return saved

        policy = Policy(model_of(CONFIGS["llama"]), config)
        weights = {weight.untyped_storage().data_ptr() for weight in policy.model.parameters()}
        nothing = torch.zeros(99, dtype=torch.float64)
        micro = pad_rows([Row([7] * 100, torch.arange(1, 100), nothing, nothing, 0, 0)])
        inner = lean._Recipes.pack

        def watched(table: lean._Recipes, saved: torch.Tensor) -> object:
            packed = inner(table, saved)
            note(packed._inputs if isinstance(packed, lean._Recipe) else packed)
            return packed

        with pytest.MonkeyPatch.context() as patch, saved_tensors_hooks(note, lambda saved: saved):
            patch.setattr(lean._Recipes, "pack", watched)
            policy.score(micro)
        return sum(size for place, size in sizes.items() if place not in weights)

    few = kept(GRPOConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentenv.training.learners.torch.policy.keep_less", lambda model: None)
        many = kept(GRPOConfig())

    assert few < 0.7 * many


def test_checkpointed_layers_keep_no_inputs_of_norms():
    def peak() -> int:
        policy = Policy(model_of(deep), checkpointing)
        tracker = MemoryTracker(policy.model.parameters())
        with tracker.counting():
            policy.score(micro)[0].sum().backward()
        return max(tracker.peaks.values())

    deep = Qwen3Config(**SIZES | {"num_hidden_layers": 16})
    checkpointing = GRPOConfig(gradient_checkpointing=True)
    nothing = torch.zeros(1, dtype=torch.float64)
    micro = pad_rows([Row([7] * 400, torch.tensor([1]), nothing, nothing, 0, 0)])
    ours = peak()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentenv.training.learners.torch.policy.keep_less", lambda model: None)
        plain = peak()

    assert ours < 1.05 * plain


def pass_of_a_deep_model() -> tuple[Policy, MicroBatch]:
    policy = Policy(model_of(LlamaConfig(**SIZES | {"num_hidden_layers": 12})), GRPOConfig())
    nothing = torch.zeros(99, dtype=torch.float64)
    return policy, pad_rows([Row([7] * 100, torch.arange(1, 100), nothing, nothing, 0, 0)])


def test_the_backward_pass_frees_the_inputs_of_norms_on_its_way():
    policy, micro = pass_of_a_deep_model()
    inputs: list[StorageWeakRef] = []
    kept: list[int] = []
    model = policy.model.model
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            module.register_forward_pre_hook(
                lambda _, given: inputs.append(StorageWeakRef(given[0].untyped_storage()))
            )
    model.layers[0].register_full_backward_pre_hook(
        lambda *_: kept.append(sum(not one.expired() for one in inputs))
    )

    policy.score(micro)[0].sum().backward()

    assert len(inputs) == 25
    assert kept[0] <= 3  # those of the first layer, and its output


def test_a_function_that_saves_its_own_output_is_freed_without_a_backward_pass():
    inputs = torch.randn(9, requires_grad=True)
    with recipes():
        output = (2 * inputs).exp()
    gradient = torch.autograd.grad(output.sum(), inputs, retain_graph=True)[0]
    place = StorageWeakRef(output.untyped_storage())

    torch.testing.assert_close(gradient, 2 * (2 * inputs).exp())
    del output
    assert place.expired()


def test_a_norm_that_computes_something_else_is_left_alone():
    model = model_of(Gemma2Config(**SIZES, attn_implementation="eager"))

    keep_less(model)

    assert replaced(model) == 0


def test_an_mlp_with_another_activation_is_left_alone():
    model = model_of(LlamaConfig(**SIZES, hidden_act="gelu"))

    keep_less(model)

    assert replaced(model) == 5


def test_weights_that_are_zero_hide_no_other_activation():
    model = model_of(LlamaConfig(**SIZES, hidden_act="gelu"))
    plain = copy.deepcopy(model)
    for layer in (*model.model.layers, *plain.model.layers):
        nn.init.zeros_(layer.mlp.down_proj.weight)

    keep_less(model)

    assert torch.equal(gradients(model)[0], gradients(plain)[0])
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        one.data += torch.linspace(-0.1, 0.1, one.numel()).view_as(one)
        other.data.copy_(one)
    assert torch.equal(gradients(model)[0], gradients(plain)[0])


def test_a_norm_of_the_same_parts_that_takes_a_gate_is_left_alone():
    class GatedNorm(LlamaRMSNorm):
        def forward(self, hidden_states, gate=None):
            hidden_states = super().forward(hidden_states)
            return hidden_states if gate is None else hidden_states * gate

    norm = GatedNorm(8)

    keep_less(norm)

    assert replaced(norm) == 0
    assert norm(torch.ones(2, 8), torch.zeros(2, 8)).abs().max() == 0


def test_a_class_that_inherits_a_known_forward_pass_is_replaced():
    class OwnName(LlamaRMSNorm):
        pass

    norm = OwnName(8)

    keep_less(norm)

    assert replaced(norm) == 1


def test_layers_that_get_adapters_later_compute_with_them():
    model = model_of(CONFIGS["llama"])
    keep_less(model)
    mlp = model.model.layers[0].mlp
    inputs = torch.randn(1, 3, 32)
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Linear(32, 32))

    torch.testing.assert_close(mlp(inputs), type(mlp).forward(mlp, inputs))


def test_frozen_weights_get_no_gradient():
    model = model_of(CONFIGS["llama"])
    for name, weight in model.named_parameters():
        weight.requires_grad_("layers.0" in name and "norm" not in name and "down_proj" not in name)
    keep_less(model)

    with recipes():
        gradients_of_some = gradients(model)[1]

    found = [
        name
        for (name, _), one in zip(model.named_parameters(), gradients_of_some, strict=True)
        if one is not None
    ]
    assert found
    assert all("layers.0" in name and "norm" not in name and "down_proj" not in name for name in found)


def test_a_recipe_is_used_for_the_output_of_its_norm_only():
    table = lean._Recipes()
    output = torch.randn(2, 3)
    table.add(output, lean._Recipe(torch.randn(2, 3), torch.ones(3), 1e-6))

    assert isinstance(table.pack(output), lean._Recipe)
    assert isinstance(table.pack(output.detach()), lean._Recipe)
    for other in (output.clone(), output[:1], output.T):
        assert table.pack(other) is other


def test_a_recipe_that_nobody_saved_is_forgotten_with_the_output_of_its_norm():
    table = lean._Recipes()
    output = torch.randn(2, 3)
    recipe = lean._Recipe(torch.randn(2, 3), torch.ones(3), 1e-6)
    table.add(output, recipe)
    held = weakref.ref(recipe)

    del recipe
    assert held() is not None
    del output
    assert held() is None
