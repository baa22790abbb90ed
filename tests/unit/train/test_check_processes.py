"""Check 7: two processes with an uneven split have the gradient of one, replicated and sharded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

WORKER = """
import sys, torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel
from agentenv.train import GRPOConfig, GRPOTrainer
from agentenv.train.batch import Row
from agentenv.train.metrics import Meter
from agentenv.train.update import accumulate, assign_weights

out, sharded, reduction = sys.argv[1], sys.argv[2] == "shard", sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(0)
config = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
model = GPT2LMHeadModel(config).double().eval()
options = {"loss_type": "grpo", "reduction": reduction, "max_completion_length": 40, "fsdp": sharded}
trainer = GRPOTrainer(GRPOConfig(packing="padded", tokens_per_micro_batch=12, **options), model=model)
draw = torch.Generator().manual_seed(1)
rows = []
for number, length in enumerate((4, 25, 9, 14)):
    ids = torch.randint(0, 61, (length + 3,), generator=draw).tolist()
    positions = torch.arange(3, length + 3)
    values = torch.randn(2, length, generator=draw, dtype=torch.float64)
    rows.append(Row(ids, positions, values[0] - 4, values[1], number, number // 2))
world = trainer.world
mine = rows if world.size == 1 else (rows[:3] if world.rank == 0 else rows[3:])
if reduction == "prompt_mean" and world.size > 1:
    mine = rows[:2] if world.rank == 0 else rows[2:]
assign_weights(mine, trainer.config, total=world.total)
accumulate(trainer.policy, mine, Meter())
world.add_gradients(trainer.optimizer)
grads = [one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad for one in trainer.optimizer.masters]
if world.rank == 0:
    torch.save([grad.clone() for grad in grads], out)
if world.size > 1:
    dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(out: Path, size: int, how: str, reduction: str) -> list[torch.Tensor]:
    port = str(free_port())
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    base["OMP_NUM_THREADS"] = "1"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(out), how, reduction],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    for process in started:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    return torch.load(out)


@pytest.mark.parametrize("reduction", ["token_mean", "seq_mean", "constant", "prompt_mean"])
@pytest.mark.parametrize("how", ["replicate", pytest.param("shard", marks=pytest.mark.exhaustive)])
def test_check_07_two_processes_have_the_gradient_of_one(tmp_path, how, reduction):
    truth = run(tmp_path / "one", 1, "replicate", reduction)

    split = run(tmp_path / "two", 2, how, reduction)

    gap = sum((a - b).square().sum() for a, b in zip(split, truth, strict=True)) ** 0.5
    size = sum(b.square().sum() for b in truth) ** 0.5
    assert (gap / size).item() <= 1e-12
