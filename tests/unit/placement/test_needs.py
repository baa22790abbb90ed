"""What a plan counts is what a training holds, within 20 %: in one process, and sharded over two."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from agentenv.core.settings import build
from agentenv.placement import Trained, model_sizes
from agentenv.training import GRPOConfig
from helpers.ranks import run_driver

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 2000,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}
MODELS = {
    "qwen3": Qwen3Config(num_hidden_layers=6, tie_word_embeddings=False, **SIZES),
    "llama-tied": LlamaConfig(num_hidden_layers=5, tie_word_embeddings=True, **SIZES),
    "moe": Qwen3MoeConfig(
        num_hidden_layers=4, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, **SIZES
    ),
    "many-words": Qwen3Config(
        num_hidden_layers=1, tie_word_embeddings=True, **{**SIZES, "vocab_size": 40_000}
    ),
}
OPTIONS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "checkpointing": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "each-pass": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "lora": {"dtype": "bfloat16", "lora": {"r": 4}},
}
CASES = [
    ("qwen3", "bfloat16", 1, 512),
    ("qwen3", "checkpointing", 1, 2048),
    ("qwen3", "float32", 1, 512),
    ("qwen3", "lora", 1, 512),
    ("llama-tied", "bfloat16", 1, 512),
    ("moe", "bfloat16", 1, 512),
    ("many-words", "checkpointing", 1, 4096),
    ("qwen3", "bfloat16", 2, 512),
    ("qwen3", "lora", 2, 512),
    ("qwen3", "each-pass", 2, 2048),
]

# Every rank is a fork of this process and measures real training passes with PyTorch's profiler.
DRIVER = """
import json, sys
import torch
import torch.distributed.fsdp
import transformers
from agentenv.core.settings import build
from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import MasterOptimizer, Policy, add_lora, logprob
from agentenv.training.learners.torch.packing import pad_rows
from agentenv.training.rows import Row
from helpers.ranks import peak_of, play

torch.set_num_threads(1)
logprob.CHUNK = logprob.CHUNK_ON_CUDA  # plans are for GPUs
OUT = sys.argv[1]
with open(f"{OUT}/cases.json") as file:
    CASES = json.load(file)


def row_of(tokens):
    positions_n = torch.arange(tokens - tokens // 4 + 1, tokens + 1)
    nothing_n = torch.zeros(len(positions_n), dtype=torch.float64)
    return pad_rows([Row([0] * (tokens + 1), positions_n, nothing_n, nothing_n, 0, 0)])


def measure(size):
    found = {}
    for name, (config, options, ranks, tokens) in CASES.items():
        if ranks != size:
            continue
        train = build(GRPOConfig, options, {"fsdp": size > 1})
        config = transformers.AutoConfig.for_model(**config)
        dtype = torch.float32 if train.dtype == "float32" else torch.bfloat16
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        policy = Policy(model if train.lora is None else add_lora(model, train.lora), train)
        policy.shard()
        optimizer = MasterOptimizer(policy.model.named_parameters(), train)
        micro = row_of(tokens)

        def passes():
            for number in (1, 2):
                policy.world.reduce_gradients(policy.base, each="each-pass" in name, last=number == 2)
                policy.score(micro)[0].sum().backward()

        passes()
        optimizer.zero_grad()
        found[name] = peak_of(passes)
        rank = policy.world.rank
    if found and rank == 0:
        with open(f"{OUT}/peaks-{size}.json", "w") as file:
            json.dump(found, file)


play(lambda: measure(1), 1)
play(lambda: measure(2), 2)
"""


def name_of(case: tuple[str, str, int, int]) -> str:
    return " ".join(map(str, case))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Return the peaks of real passes."""
    out = tmp_path_factory.mktemp("peaks")
    cases = {name_of(case): (MODELS[case[0]].to_dict(), OPTIONS[case[1]], case[2], case[3]) for case in CASES}
    (out / "cases.json").write_text(json.dumps(cases))
    run_driver(DRIVER, out)
    return {name: peak for file in out.glob("peaks-*") for name, peak in json.loads(file.read_text()).items()}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_plan_counts_what_the_passes_of_a_training_hold(measured, case):
    model, options, ranks, tokens = case
    config = build(GRPOConfig, OPTIONS[options], {"tokens_per_micro_batch": tokens})
    sizes = model_sizes(json.loads(MODELS[model].to_json_string()))

    device_bytes = 1 if options == "each-pass" else 80 * 10**9
    parts = Trained(sizes, config, tokens).trainer(ranks, device_bytes).parts

    planned = sum(parts[name] for name in ("gradients", "gathered", "activations"))
    assert planned == pytest.approx(measured[name_of(case)], rel=0.2)
