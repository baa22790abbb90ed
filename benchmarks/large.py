"""Layers of the shape of Qwen3-8B at long contexts, with random weights: does a step take what a plan says?

    python benchmarks/large.py --device cuda --json build/large.json
    python benchmarks/large.py --device cpu --quick           # tries the same code without a GPU, in small

Two layers (4,096 wide, 32 heads, 8 of them with keys, 12,288 in the MLP) train one step on a single row,
after one to warm up. `seconds` is the step, `GB` the most memory of it beyond what stays, and `plan` what
`agentenv plan` counts for that. `offload` keeps the optimiser in main memory, and `shards` is FSDP of one
process.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentenv.placement import Trained, model_sizes
from agentenv.training import GRPOConfig, GRPOTrainer
from agentenv.training.learners.torch import Policy

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": {"optimizer_offload": True},
    "shards": {"fsdp": True},
}


def trainer_of(sizes: Mapping[str, Any], tokens: int, device: str, **options: Any) -> GRPOTrainer:
    """Return a trainer of two layers with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes, num_hidden_layers=2, max_position_embeddings=tokens, tie_word_embeddings=True
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    settings = {"dtype": "bfloat16", "device": device, "gradient_checkpointing": True, **options}
    return GRPOTrainer(GRPOConfig(tokens_per_micro_batch=tokens, **settings), model=model)


def row_of(tokens: int, vocab_size: int) -> Any:
    """Return a row whose last quarter is trained."""
    from agentenv.training.rows import Row

    ids = torch.randint(1, vocab_size, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    trained = torch.arange(3 * tokens // 4, tokens)
    return Row(
        ids, trained, torch.full((len(trained),), -6.0).double(), torch.ones(len(trained)).double(), 0, 0
    )


def step(trainer: GRPOTrainer, row: Any) -> float:
    """Make one step; return its seconds."""
    from agentenv.training.learners.torch.passes import accumulate
    from agentenv.training.metrics import Meter
    from agentenv.training.step import assign_weights

    optimizer = trainer.learner.optimizer  # made first, because it collects the gradients
    began = time.perf_counter()
    (row,) = assign_weights([row], trainer.config)
    accumulate(trainer.learner.policy, [row], Meter())
    norm = optimizer.step(1e-6)
    if trainer.learner.policy.device.type == "cuda":
        torch.cuda.synchronize()
    if not 0 < norm < float("inf"):
        raise SystemExit(f"the gradient's norm is {norm}")
    return time.perf_counter() - began


def measured(way: str, sizes: Mapping[str, Any], tokens: int, device: str) -> dict[str, Any]:
    """Return the figures of one way."""
    trainer = trainer_of(sizes, tokens, device, **WAYS[way])
    row = row_of(tokens, sizes["vocab_size"])
    step(trainer, row)
    before = 0
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    found: dict[str, Any] = {"way": way, "tokens": tokens, "seconds": step(trainer, row)}
    if device == "cuda":
        found["GB"] = (torch.cuda.max_memory_allocated() - before) / 1e9
    if way == "plain":
        planned = Trained(model_sizes(trainer.model.config.to_dict()), trainer.config, tokens)
        parts = planned.trainer(1, 80 * 10**9).parts
        found["plan"] = (parts["gradients"] + parts["activations"]) / 1e9
    return found


def main(device: str, *, quick: bool, file: Path | None = None) -> list[dict[str, Any]]:
    """Return the figures of all ways and lengths, and write each; a way that fails has the reason."""
    # A process group of one, so that a single process can shard.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    sharded = property(lambda policy: bool(policy.config.fsdp))
    setattr(Policy, "to_be_sharded", sharded)  # noqa: B010 - one process shards nothing by itself
    found: list[dict[str, Any]] = []
    for tokens in (256,) if quick else (8192, 32_768):
        for way in WAYS:
            try:
                found.append(measured(way, SMALL if quick else SIZES, tokens, device))
            except torch.OutOfMemoryError as error:
                found.append({"way": way, "tokens": tokens, "failed": str(error).split(". ")[0]})
            print(found[-1], flush=True)
            if file is not None:
                file.write_text(json.dumps(found, indent=1) + "\n")
            if device == "cuda":
                torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="small layers and one short row")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    main(given.device, quick=given.quick, file=given.json)
