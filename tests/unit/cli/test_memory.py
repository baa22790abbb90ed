"""What a plan counts for a training on a GPU stands beside what its device held, in the log and in the run."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from agentenv.cli.memory import MemoryBeside
from agentenv.core import RunLimits
from agentenv.placement import Trained, model_sizes
from agentenv.training import GRPOConfig

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}


def plan_of(tmp_path, **options):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = GRPOConfig(model=str(tmp_path), dtype="bfloat16", **options)
    return SimpleNamespace(config=config, limits=RunLimits(max_context_tokens=4096))


def test_the_plan_is_told_at_the_start_and_beside_the_first_step(tmp_path, caplog):
    plan, memory = plan_of(tmp_path), MemoryBeside(lambda: 80 * 10**9)
    with caplog.at_level(logging.WARNING):
        counted = memory.begin(plan)
        memory.step({"reward": 0.5})  # an evaluation before the first step
        memory.step({"memory/held_gb/max": 9.87})
        memory.step({"memory/held_gb/max": 11.0})

    planned = Trained(model_sizes(CONFIG), plan.config, 4096).trainer(1, 80 * 10**9).total / 1e9
    assert counted == {"memory/planned_gb": pytest.approx(planned)}
    assert [record.getMessage() for record in caplog.records] == [
        f"the plan counts {planned:.1f} GB on each device that trains",
        f"the first step held at most 9.9 GB; the plan counted {planned:.1f}",
    ]


def test_each_of_two_processes_is_counted_whole_unless_they_share_the_model(tmp_path, monkeypatch):
    def counted(**options) -> float:
        plan = plan_of(tmp_path, tokens_per_micro_batch=4096, **options)
        return MemoryBeside(lambda: 80 * 10**9).begin(plan)["memory/planned_gb"]

    alone = counted()
    monkeypatch.setenv("WORLD_SIZE", "2")

    assert counted() == alone
    assert counted(fsdp=True) < alone


@pytest.mark.parametrize(
    ("total", "device", "has_config"),
    [(None, "auto", True), (80 * 10**9, "cpu", True), (80 * 10**9, "auto", False)],
    ids=["no GPU", "cpu", "no config"],
)
def test_without_a_gpu_or_a_config_nothing_is_counted(tmp_path, caplog, total, device, has_config):
    memory, plan = MemoryBeside(lambda: total), plan_of(tmp_path, device=device)
    if not has_config:
        (tmp_path / "config.json").unlink()

    assert memory.begin(plan) == {}
    memory.step({})
    assert not caplog.records
