"""A LoRA checkpoint is a model like any other: it is loaded, played, evaluated and trained on."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agentenv.core import DependencyMissing, ModelNotFound, UsageError
from agentenv.engine import Sampling, load_engine
from agentenv.engine.hf import locate
from agentenv.engine.vllm import ServeOptions
from agentenv.engine.vllm.build import Build
from agentenv.engine.vllm.launch import server_command
from agentenv.render import byte_tokenizer
from agentenv.training import GRPOConfig, GRPOTrainer, LoraOptions
from agentenv.training.loop.checkpoint import save_tokenizer
from helpers.training import group, tiny

BATCH = [group("a", [0.0, 1.0, 0.3])]
PROMPT = list(b"what is 2 + 3?")


def trainer_of(model: Path, **options) -> GRPOTrainer:
    settings = {"learning_rate": 0.05, "dtype": "float32", "device": "cpu", **options}
    return GRPOTrainer(GRPOConfig(model=str(model), **settings))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base model with its tokenizer, and an adapter that was trained on it and saved."""
    folder = tmp_path_factory.mktemp("models")
    tiny(0, torch.float32, vocab_size=300).save_pretrained(folder / "base")
    save_tokenizer(byte_tokenizer(), folder / "base")
    trainer = trainer_of(folder / "base", lora=LoraOptions(r=4))
    trainer.step(BATCH)
    trainer.save(folder / "adapter")
    torch.save(logits(trainer.model), folder / "logits.pt")
    return folder


@pytest.mark.parametrize("lora", [None, LoraOptions(r=2)])
def test_a_saved_adapter_is_loaded_and_training_continues_it(folder, tmp_path, lora):
    base = logits(trainer_of(folder / "base").model)

    trainer = trainer_of(folder / "adapter", lora=lora, beta=0.1)
    loaded = logits(trainer.model)
    before = {name: one.clone() for name, one in trainer.model.named_parameters()}
    first, second = trainer.step(BATCH), trainer.step(BATCH)
    moved = {n for n, one in trainer.model.named_parameters() if not torch.equal(one, before[n])}

    assert torch.equal(loaded, torch.load(folder / "logits.pt"))
    assert (loaded - base).abs().max() > 1e-2
    assert moved == {name for name in before if "lora_" in name and ".default." in name}
    assert first["kl"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl"] > 1e-6  # to the adapter as it was loaded
    with trainer.model.disable_adapter():
        assert torch.equal(logits(trainer.model), base)
    again = trainer_of(trainer.save(tmp_path / "again"))
    assert torch.equal(logits(again.model), logits(trainer.model))


def test_a_resumed_training_says_that_the_base_below_its_adapter_has_changed(folder, tmp_path, caplog):
    base = shutil.copytree(folder / "base", tmp_path / "base")
    saved = trainer_of(base, lora=LoraOptions(r=4)).save(tmp_path / "saved")

    trainer_of(base, lora=LoraOptions(r=4)).resume(saved)
    assert "differs from the one that was saved" not in caplog.text
    tiny(1, torch.float32, vocab_size=300).save_pretrained(base)
    trainer_of(base, lora=LoraOptions(r=4)).resume(saved)

    assert f"loaded from {saved} differs from the one that was saved by" in caplog.text


def test_the_base_is_found_from_any_directory_and_as_a_lone_file(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    trainer = trainer_of(Path("base"), lora=LoraOptions(r=4))
    path = trainer.save(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)

    assert locate(str(path)).base == locate(str(folder / "base"))


def test_the_tokenizer_lies_beside_the_adapter_or_else_beside_its_base(folder, tmp_path):
    trainer = trainer_of(folder / "adapter")
    assert trainer.renderer.tokenizer.chat_template == byte_tokenizer().chat_template
    assert locate(str(folder / "adapter")).tokenizer.path == str(folder / "adapter")

    bare = shutil.copytree(
        folder / "adapter", tmp_path / "bare", ignore=shutil.ignore_patterns("*token*", "chat_template*")
    )

    assert locate(str(bare)).tokenizer.path == str(folder / "base")


def test_the_transformers_engine_plays_a_saved_adapter_or_the_base_below_it(folder):
    greedy = Sampling(temperature=0.0, max_tokens=1)

    async def first(path: Path, sampling: Sampling = greedy) -> tuple[int, float]:
        engine = load_engine(f"hf:{path}", dtype="float32", device="cpu").engine
        said = await engine.generate(PROMPT, sampling, stop_token_ids=())
        await engine.close()
        return said.token_ids[0], said.logprobs[0]

    truth = torch.load(folder / "logits.pt")[0, -1].log_softmax(-1)
    token, logprob = asyncio.run(first(folder / "adapter"))

    assert token == truth.argmax()
    assert logprob == pytest.approx(truth.max().item(), abs=1e-4)
    base = asyncio.run(first(folder / "base"))
    assert base[1] != pytest.approx(truth.max().item(), abs=1e-3)
    below = asyncio.run(first(folder / "adapter", replace(greedy, adapter=None)))
    assert below == (base[0], pytest.approx(base[1], abs=1e-4))


def test_an_adapter_without_its_base_says_what_is_missing(folder, tmp_path):
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write = (adapter / "adapter_config.json").write_text
    write(json.dumps({**config, "base_model_name_or_path": "/gone"}))

    with pytest.raises(ModelNotFound, match="has no weights"):
        locate(str(adapter))
    (adapter / "adapter_model.safetensors").touch()
    with pytest.raises(ModelNotFound, match=r"without its base model: .*'/gone'.* base_model_name_or_path"):
        locate(str(adapter))
    write(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(ModelNotFound, match="does not name its base model"):
        locate(str(adapter))
    write(json.dumps({**config, "base_model_name_or_path": str(adapter)}))
    with pytest.raises(UsageError, match="names another adapter"):
        locate(str(adapter))
    write(json.dumps({**config, "peft_type": "PROMPT_TUNING"}))
    with pytest.raises(UsageError, match="PROMPT_TUNING; use one of type LORA"):
        locate(str(adapter))


def test_an_adapter_of_another_model_is_refused(folder, tmp_path):
    tiny(0, torch.float32, hidden_size=16).save_pretrained(tmp_path / "small")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for file in (folder / "adapter").iterdir():
        (adapter / file.name).write_bytes(file.read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "small")
    (adapter / "adapter_config.json").write_text(json.dumps(config))

    with pytest.raises(ModelNotFound, match="does not fit the model at"):
        trainer_of(adapter)


def test_without_peft_an_adapter_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(DependencyMissing, match=r"(?s)adapter at .*train"):
        trainer_of(folder / "adapter")


def test_vllm_is_not_started_on_the_base_alone(folder):
    with pytest.raises(UsageError, match="is a LoRA adapter of"):
        server_command(str(folder / "adapter"), ServeOptions(), Build(cpu=True, free=None))
    with pytest.raises(UsageError, match="is a LoRA adapter of"):
        load_engine(f"vllm:{folder / 'adapter'}")
