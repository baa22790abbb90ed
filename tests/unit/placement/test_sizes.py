"""The sizes that formulas give are those of the models of transformers, which are made here without memory."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
)

from agentenv.core import ModelNotFound, UsageError
from agentenv.placement import model_sizes, read_config
from agentenv.training import LoraOptions

SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "intermediate_size": 1536}
GROUPED = {"num_attention_heads": 32, "num_key_value_heads": 8}
MODELS = {
    "SmolLM2-135M": LlamaConfig(
        **SMOLLM2, num_key_value_heads=3, vocab_size=49_152, tie_word_embeddings=True
    ),
    "Llama-3.1-8B": LlamaConfig(
        **GROUPED, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, vocab_size=128_256
    ),
    "Qwen3-8B": Qwen3Config(**GROUPED, num_hidden_layers=36, head_dim=128, intermediate_size=12_288),
    "Qwen3-30B-A3B": Qwen3MoeConfig(num_hidden_layers=48, num_attention_heads=32, head_dim=128),
    "Qwen2.5": Qwen2Config(),
    "Qwen1.5-MoE": Qwen2MoeConfig(),
    "Mixtral": MixtralConfig(),
    "DeepSeek-V3": DeepseekV3Config(num_hidden_layers=6),
    "Qwen3-Next": Qwen3NextConfig(num_hidden_layers=8),
    "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "Gemma-2": Gemma2Config(),
    "Phi-1.5": PhiConfig(),
    "Phi-3": Phi3Config(),
}
SEEING = {"Gemma-3": Gemma3Config(), "Qwen2.5-VL": Qwen2_5_VLConfig(), "Qwen3-VL": Qwen3VLConfig()}


def sizes_of(config):
    return model_sizes(json.loads(config.to_json_string()))


def model_of(config, auto=AutoModelForCausalLM):
    with torch.device("meta"):
        return auto.from_config(config)


def count(parameters) -> int:
    return sum(one.numel() for one in parameters)


@pytest.mark.parametrize("name", MODELS)
def test_the_parameters_of_a_model_are_those_of_its_class(name):
    want = count(model_of(MODELS[name]).parameters())

    assert sizes_of(MODELS[name]).parameters == pytest.approx(want, rel=0.002)


@pytest.mark.parametrize("name", SEEING)
def test_the_tower_of_a_model_that_sees_is_counted_and_frozen_unless_asked(name):
    model = model_of(SEEING[name], AutoModelForImageTextToText)
    language = [
        one for path, one in model.named_parameters() if "language_model" in path or "lm_head" in path
    ]
    sizes = sizes_of(SEEING[name])

    assert sizes.parameters == pytest.approx(count(model.parameters()), rel=0.02)
    assert sizes.trained(None) == pytest.approx(count(language), rel=0.01)
    assert sizes.trained(None, vision=True) == sizes.parameters


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen3-8B", "Qwen3-30B-A3B", "Phi-1.5"])
def test_adapters_are_counted_on_the_linear_modules_that_are_named(name):
    linear = {
        path: module
        for path, module in model_of(MODELS[name]).named_modules()
        if isinstance(module, torch.nn.Linear) and path != "lm_head"
    }
    sizes = sizes_of(MODELS[name])

    assert sizes.trained(LoraOptions(r=4)) == sum(4 * sum(one.weight.shape) for one in linear.values())
    queries = [one for path, one in linear.items() if path.endswith("q_proj")]
    some = LoraOptions(r=4, target_modules=("q_proj",))
    assert sizes.trained(some) == sum(4 * sum(one.weight.shape) for one in queries)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Qwen3-8B", 2 * 36 * 8 * 128),
        ("DeepSeek-V3", 6 * (512 + 64)),
        ("Qwen3-Next", 2 * 2 * 2 * 256),
    ],
)
def test_a_token_keeps_keys_and_values_or_what_a_family_has_instead(name, values):
    assert sizes_of(MODELS[name]).cache_values == values


def test_a_published_config_of_gemma_3_leaves_heads_and_words_to_its_class():
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": vision}

    assert model_sizes(config).parameters == pytest.approx(4.3e9, rel=0.01)


@pytest.mark.parametrize(
    "change", [{"hidden_size": None}, {"num_attention_heads": 0}, {"vocab_size": "many"}]
)
def test_a_config_without_the_sizes_of_a_decoder_is_refused(change):
    config = json.loads(LlamaConfig().to_json_string()) | {"head_dim": None} | change

    with pytest.raises(UsageError, match="config of llama cannot be planned"):
        model_sizes(config)


@pytest.mark.parametrize("text", ["", "{", "null", "[" * 100_000], ids=["empty", "open", "null", "deep"])
def test_a_file_that_is_no_config_is_one_clear_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelNotFound, match="cannot be read"):
        read_config(str(tmp_path))
