"""Private names of torch, transformers and peft: where they exist, what they do, and what is done without."""

from __future__ import annotations

import copy
import re
import sys
from datetime import timedelta
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM

import agentenv
from agentenv.core import torch_internals as of_torch
from agentenv.core import transformers_internals as of_transformers
from agentenv.engine import Sampling, TransformersEngine
from agentenv.engine.hf import peft_internals as of_peft
from agentenv.engine.hf.load import locate
from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import Policy
from agentenv.training.learners.torch.packing import pad_rows
from agentenv.training.learners.torch.routers import Routers
from agentenv.training.unread import Refused, unread_model
from helpers.moe import tiny_moe
from helpers.training import group, make_row, tiny, trainer_of

GONE = "_gone"
NAMES = [
    *(getattr(of_transformers, name) for name in ("ATTENTION", "SDPA", "RECORDERS", "LAYERS", "IGNORED")),
    *of_transformers.KEPT_WIDE,
    *(of_torch.ATTENTION, of_torch.GLOO_OPTIONS),
    *(of_peft.DISABLED, of_peft.ACTIVE),
]


def test_private_names_stand_in_one_module_each():
    ours = Path(agentenv.__file__).parent
    names = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in NAMES))
    modules = re.compile(
        r"(?:from|import) (?:torch|transformers|peft)(?:\.\w+)*\._\w+|torch\.testing\._internal"
    )
    found = {
        file.name
        for file in ours.rglob("*.py")
        if (text := file.read_text()) and (names.search(text) or modules.search(text))
    }

    assert found == {"torch_internals.py", "transformers_internals.py", "peft_internals.py"}


# torch


def test_torch_has_the_names():
    assert of_torch.has_attention_with_sums()
    assert hasattr(dist.ProcessGroupGloo, of_torch.GLOO_OPTIONS)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_returns_the_log_sum_exp_and_takes_it_back(causal):
    given = tuple(torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))
    truth = scaled_dot_product_attention(*given, is_causal=causal, scale=0.3)
    grad = torch.randn_like(truth)
    wanted = torch.autograd.grad(truth, given, grad)
    scores = 0.3 * given[0] @ given[1].mT
    if causal:
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)

    with torch.no_grad():
        output, sums = of_torch.attention_with_sums(given, causal=causal, scale=0.3)
        found = of_torch.attention_gradients(grad, (*given, output, sums), causal=causal, scale=0.3)

    torch.testing.assert_close(output, truth)
    torch.testing.assert_close(sums, scores.logsumexp(-1))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", ["ATTENTION", "ATTENTION_BACKWARD"])
def test_without_the_kernels_rows_are_padded(name, monkeypatch):
    batch = [group("a", [0.0, 1.0, 0.3])]
    tree, padded = trainer_of(), tiny()
    monkeypatch.setattr(of_torch, name, GONE)
    padded = trainer_of(padded)

    assert tree.learner.policy.packable
    assert "no attention over a tree" in padded.learner.policy.pack_reason
    tree.step(batch)
    padded.step(batch)
    for ours, theirs in zip(padded.model.parameters(), tree.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_the_compiler_may_keep_more_versions():
    from torch._dynamo import config

    with config.patch(recompile_limit=8):
        of_torch.allow_compiled_versions(21)
        assert config.recompile_limit == 21
        of_torch.allow_compiled_versions(3)
        assert config.recompile_limit == 21


def test_without_its_settings_the_compiler_decides(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)

    of_torch.allow_compiled_versions(21)


@pytest.mark.parametrize("name", [of_torch.GLOO_OPTIONS, GONE])
def test_a_group_of_cpus_is_made_with_and_without_options(name, monkeypatch):
    monkeypatch.setattr(of_torch, "GLOO_OPTIONS", name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    made = of_torch.gloo_group(dist.HashStore(), 0, 1, address="127.0.0.1", limit=timedelta(seconds=9))

    given = torch.arange(3)
    made.broadcast([given], dist.BroadcastOptions()).wait()
    assert (made.size(), given.tolist()) == (1, [0, 1, 2])


# transformers


def test_transformers_has_the_names():
    model = tiny()
    assert of_transformers.attention_of(model.config) == "sdpa"
    assert of_transformers.supports_sdpa(model)
    assert of_transformers.split_layers(model) == list(model.model.layers)
    assert of_transformers.keeps_float32(model) is False
    assert all(
        hasattr(LlamaForCausalLM, name) for name in (*of_transformers.KEPT_WIDE, of_transformers.IGNORED)
    )
    found = of_transformers.router_modules(tiny_moe().get_decoder())
    assert found is not None
    assert [name.split(".")[1] for name in found.modules] == ["0", "1", "2"]
    assert of_transformers.router_modules(model.get_decoder()) is None


@pytest.mark.parametrize("name", ["ATTENTION", "SDPA"])
async def test_attention_that_is_not_known_is_left_as_it_is(name, monkeypatch):
    model = tiny(dtype=torch.float32)
    asked = Sampling(max_tokens=6, temperature=0.0)
    engine = TransformersEngine(copy.deepcopy(model))
    truth = await engine.generate([1, 2, 3], asked, stop_token_ids=())
    await engine.close()
    monkeypatch.setattr(of_transformers, name, GONE)

    plain = TransformersEngine(model)
    answer = await plain.generate([1, 2, 3], asked, stop_token_ids=())
    await plain.close()

    assert answer.token_ids == truth.token_ids
    monkeypatch.undo()
    assert of_transformers.attention_of(model.config) == "sdpa"


def test_rows_of_a_model_whose_attention_is_not_known_are_padded(monkeypatch):
    monkeypatch.setattr(of_transformers, "ATTENTION", GONE)

    policy = Policy(tiny(), GRPOConfig())

    assert not policy.packable
    assert any("padded, not packed" in finding for finding in policy.check())
    policy.score(pad_rows([make_row([1, 2, 3, 4], [3])]))


def test_layers_without_names_are_those_that_can_be_checkpointed(monkeypatch):
    monkeypatch.setattr(of_transformers, "LAYERS", GONE)
    model = tiny()

    assert of_transformers.split_layers(model) == list(model.model.layers)


def test_routers_that_are_not_named_are_not_used(monkeypatch):
    monkeypatch.setattr(of_transformers, "RECORDERS", GONE)

    assert Routers.of(tiny_moe().get_decoder()) is None


def test_weights_of_a_model_that_does_not_say_which_stay_wide_are_read_by_transformers(monkeypatch, tmp_path):
    model = tiny(dtype=torch.bfloat16)
    monkeypatch.setattr(of_transformers, "KEPT_WIDE", (GONE,))
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(Refused, match="may stay in float32"):
        unread_model(locate(str(tmp_path)), GRPOConfig(dtype="bfloat16"))
    monkeypatch.undo()
    assert unread_model(locate(str(tmp_path)), GRPOConfig(dtype="bfloat16"))


# peft


@pytest.fixture
def adapted():
    options = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    model = get_peft_model(tiny(), LoraConfig(**options), adapter_name="first")
    model.add_adapter("second", LoraConfig(**options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def layers_of(model):
    kinds = (BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper)
    return [module for module in model.modules() if isinstance(module, kinds)]


def test_peft_has_the_names(adapted):
    for layer in layers_of(adapted):
        assert getattr(layer, of_peft.DISABLED) is layer.disable_adapters is False
        assert getattr(layer, of_peft.ACTIVE) in ("first", ["first"])


@pytest.mark.parametrize("privately", [True, False])
@pytest.mark.parametrize("name", ["second", None])
def test_an_adapter_is_used_and_what_the_trainer_set_is_restored(adapted, name, privately, monkeypatch):
    ids = torch.tensor([[1, 2, 3]])
    before = adapted(ids).logits
    if name is None:
        with adapted.disable_adapter():
            wanted = adapted(ids).logits
    else:
        adapted.set_adapter(name)
        wanted = adapted(ids).logits
        adapted.set_adapter("first")
    trained = [parameter.requires_grad for parameter in adapted.parameters()]
    if not privately:
        monkeypatch.setattr(of_peft, "ACTIVE", GONE)

    with of_peft.with_adapter(layers_of(adapted), name):
        inside = adapted(ids).logits

    torch.testing.assert_close(inside, wanted)
    assert not torch.allclose(inside, before)
    torch.testing.assert_close(adapted(ids).logits, before)
    assert [parameter.requires_grad for parameter in adapted.parameters()] == trained
    assert all(list(layer.active_adapters) == ["first"] for layer in layers_of(adapted))
