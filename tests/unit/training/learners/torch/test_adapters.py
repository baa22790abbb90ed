"""Adapters of users: continued with a reference they stay the same policy, also read back from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from agentenv.core import UsageError
from agentenv.render import byte_tokenizer
from agentenv.training import GRPOConfig, GRPOTrainer
from agentenv.training.learners.torch.adapters import probe
from agentenv.training.loading import load_model
from agentenv.training.loop.checkpoint import save_tokenizer
from agentenv.training.loop.sync import open_engine
from helpers.training import group, tiny

BATCH = [group("a", [0.0, 1.0, 0.3])]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("base")
    tiny(0, torch.float32, vocab_size=300).save_pretrained(path)
    save_tokenizer(byte_tokenizer(), path)
    return str(path)


def adapted(base: str, **options: Any) -> Any:
    torch.manual_seed(1)
    model = load_model(base, GRPOConfig(device="cpu"))
    return get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": "all-linear", **options}))


def trainer_of(model: Any, **options: Any) -> GRPOTrainer:
    settings = {"learning_rate": 0.01, "dtype": "float32", "device": "cpu", "beta": 0.1, **options}
    return GRPOTrainer(GRPOConfig(**settings), model=model)


@pytest.mark.parametrize("kind", ["pissa", "olora", "orthogonal", "gaussian", True])
def test_an_adapter_with_a_reference_trains_and_is_saved_as_the_policy_that_it_is(base, tmp_path, kind):
    model = adapted(base, init_lora_weights=kind)
    before = probe(model)

    trainer = trainer_of(model)
    torch.testing.assert_close(probe(trainer.model), before, rtol=0, atol=1e-6)
    first = trainer.step(BATCH)
    trainer.step(BATCH)
    trained = probe(trainer.model)
    read = load_model(str(trainer.save(tmp_path / "saved")), GRPOConfig(device="cpu"))

    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(probe(read), trained, rtol=0, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["pissa_niter_4", "corda", "loftq"])
def test_an_adapter_that_is_another_policy_when_it_is_read_back_is_refused(base, kind, beta):
    model = adapted(base, init_lora_weights="pissa_niter_4")
    model.peft_config["default"].init_lora_weights = kind  # others need data or packages to be made

    with pytest.raises(UsageError, match=r"has changed the base model, and (read|cannot be read) back"):
        trainer_of(model, beta=beta)


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_servers_get_no_adapter_that_has_changed_its_base(base, kind):
    trainer = trainer_of(adapted(base, init_lora_weights=kind), engine="http://localhost:1/v1")

    with pytest.raises(UsageError, match="servers would put it on the original one"):
        open_engine(trainer.learner, None, model_name=base)


@pytest.mark.parametrize(
    ("trained", "options"),
    [
        ("modules_to_save", {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}),
        ("lora_embedding_", {"target_modules": ["embed_tokens"]}),
        ("trainable_tokens_delta", {"trainable_token_indices": [1, 2]}),
        ("lora_B", {"bias": "lora_only"}),
        ("magnitude_vector", {"use_dora": True}),
    ],
)
def test_an_adapter_that_was_trained_outside_its_linear_layers_is_its_own_reference(base, trained, options):
    model = adapted(base, **options)
    changed = [each for name, each in model.named_parameters() if trained in name and each.requires_grad]
    for each in changed:
        each.data += torch.randn_like(each)

    trainer = trainer_of(model)
    before, first = probe(trainer.model), trainer.step(BATCH)

    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert trainer.step(BATCH)["kl"] > 1e-6
    with trainer.learner.reference._switched():
        torch.testing.assert_close(probe(trainer.model), before, rtol=0, atol=1e-6)


def test_weights_of_the_base_are_not_trained_beside_a_reference(base):
    model = adapted(base)
    model.get_input_embeddings().weight.requires_grad_(requires_grad=True)
    with pytest.raises(UsageError, match="of the base model is trained, too"):
        trainer_of(model)
