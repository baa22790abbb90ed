"""`agentenv plan` needs a config and nothing else."""

from __future__ import annotations

import pytest
from huggingface_hub import constants, hf_api
from transformers import LlamaConfig

from agentenv.cli import main


@pytest.fixture
def model(tmp_path) -> str:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    LlamaConfig(vocab_size=300, max_position_embeddings=2048, **sizes).save_pretrained(tmp_path)
    return str(tmp_path)


SMALL = ("--context", "64", "-o", "train.tokens_per_micro_batch=64")


PARTS = (
    "computed from the config",
    "1 GPU trains",
    "weights",
    "optimizer",
    "KV cache",
    "together",
    "contexts",
)


@pytest.mark.parametrize("form", ["", "hf:"])
def test_a_plan_says_what_fits_and_that_it_is_computed(model, form, command):
    said = command("plan", "-m", form + model, *SMALL, "--context", "1k", "--gpus", "2x80")
    offloaded = command("plan", "-m", form + model, *SMALL, "-o", "train.optimizer_offload=true").out
    found = command("plan", "-m", form + model, *SMALL, "--json").json

    assert said.code == 0
    assert [part for part in PARTS if part not in said.out] == []
    memory = "GB of main memory for masters, optimiser and gradients"
    assert (memory in offloaded, memory in said.out) == (True, False)
    assert (found["computed"], found["fits"]) == (True, True)
    assert found["placement"]["trainer"]["parts"]["weights"] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--context", "many"], "no number of tokens"),
        (["--gpus", "8"], "number of GPUs"),
        (["--context", "4k"], "2,048"),
    ],
)
def test_what_cannot_be_planned_is_told(model, arguments, told, command):
    said = command("plan", "-m", model, *arguments)

    assert said.code == 2
    assert told in said.err


@pytest.mark.parametrize("verb", [["plan"], ["train", "no.py"]])
def test_a_hub_that_cannot_be_reached_is_told_first_and_once(verb, tmp_path, monkeypatch, capfd):
    nobody = "http://127.0.0.1:1"
    for name, value in {"HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path), "ENDPOINT": nobody}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(hf_api.api, "endpoint", nobody)

    with pytest.raises(SystemExit, match="2"):
        main([*verb, "-m", "owner/name"])

    error, _, fix = capfd.readouterr().err.splitlines()
    assert error.startswith("error: 'owner/name' is not here, and the Hugging Face Hub did not provide it: ")
    assert fix == "  fix: check the name and the network, or name the directory of a model on this machine"
