"""`agentenv plan` needs a config and nothing else."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import constants, hf_api
from transformers import LlamaConfig
from typer.testing import CliRunner

from agentenv.cli import app, main


@pytest.fixture
def model(tmp_path) -> str:
    LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=2048,
    ).save_pretrained(tmp_path)
    return str(tmp_path)


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.mark.parametrize("form", ["", "hf:"])
def test_a_plan_says_what_fits_and_that_it_is_computed(model, form: str):
    done = run(
        "-m", form + model, "--context", "1k", "--gpus", "2x80", "-o", "train.tokens_per_micro_batch=64"
    )

    assert done.exit_code == 0, done.output
    assert "computed from the config" in done.output
    assert "1 GPU trains" in done.output
    for part in ("weights", "optimizer", "KV cache", "together", "contexts"):
        assert part in done.output


def test_a_plan_says_what_main_memory_an_offloaded_optimiser_takes(model):
    options = (
        "--context",
        "64",
        "-o",
        "train.tokens_per_micro_batch=64",
        "-o",
        "train.optimizer_offload=true",
    )

    assert "GB of main memory for masters, optimiser and gradients" in run("-m", model, *options).output
    assert "optimiser" not in run("-m", model, *options[:4]).output


def test_a_plan_for_programs(model):
    done = run("-m", model, "--context", "64", "--json", "-o", "train.tokens_per_micro_batch=64")

    found = json.loads(done.output)
    assert found["computed"] is True
    assert found["fits"] is True
    assert found["placement"]["trainer"]["parts"]["weights"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--context", "many"], "no number of tokens"),
        (["--gpus", "8"], "number of GPUs"),
        (["--context", "4k"], "2,048"),
    ],
)
def test_what_cannot_be_planned_is_told(model, arguments, said):
    done = run("-m", model, *arguments)

    assert done.exit_code == 2 or done.exception is not None
    assert said in done.output + str(done.exception)


def test_a_model_without_config_is_told(tmp_path):
    done = run("-m", str(tmp_path))

    assert "config of" in done.output + str(done.exception)


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
