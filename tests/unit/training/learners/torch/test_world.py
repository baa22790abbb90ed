"""What several processes agree on, as far as one process can show it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import MasterOptimizer
from agentenv.training.learners.torch.shards import checksum
from agentenv.training.learners.torch.world import World
from helpers.training import tiny


@pytest.mark.parametrize(
    ("dtype", "summed_in"), [(torch.bfloat16, torch.float32), (torch.float32, None), (torch.float64, None)]
)
def test_shards_sum_gradients_over_the_processes_in_float32_or_wider(monkeypatch, dtype, summed_in):
    policies = []
    monkeypatch.setattr(
        "torch.distributed.fsdp.fully_shard", lambda layer, *, mp_policy, **_: policies.append(mp_policy)
    )

    World(torch.device("cpu")).shard(tiny(dtype=dtype))

    assert len(policies) == 3  # two layers and the rest
    assert {policy.reduce_dtype for policy in policies} == {summed_in}


@pytest.mark.parametrize(
    ("here", "devices", "backend"),
    [(1, 1, "cpu:gloo,cuda:nccl"), (2, 2, "cpu:gloo,cuda:nccl"), (2, 1, "gloo"), (4, 2, "gloo")],
)
def test_processes_that_share_a_gpu_are_connected_by_gloo_and_told_so(
    here, devices, backend, monkeypatch, caplog
):
    started = []
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr("torch.distributed.init_process_group", started.append)

    World(torch.device("cuda"))

    assert started == [backend]
    assert ("NCCL connects no two of them" in caplog.text) == (backend == "gloo")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool])
def test_a_checksum_sees_the_last_bit_and_no_layout(dtype):
    draw = torch.Generator().manual_seed(0)
    matrix = (torch.randn(30, 40, generator=draw) * 100).to(dtype)
    other = matrix.clone()
    other[3, 4] = 0 if other[3, 4] else 1

    assert checksum(matrix) == checksum(matrix.t().contiguous().t())
    assert checksum(matrix) != checksum(other)


def test_one_process_shares_nothing():
    assert World(torch.device("cpu")).share_weights(tiny().state_dict()) == []


def test_replicas_add_their_gradients_in_few_messages(monkeypatch):
    messages = []
    world = World(torch.device("cpu"))
    world.size = 2
    monkeypatch.setattr(world, "gather", list)
    monkeypatch.setattr("agentenv.training.learners.torch.world.BUCKET_BYTES", 4000)

    def all_reduce(tensor, op=None):
        if op is None:  # gradients, of which the other process has the same
            messages.append(tensor.numel())
            tensor.mul_(2)

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    optimizer = MasterOptimizer(tiny().parameters(), GRPOConfig())
    draw = torch.Generator().manual_seed(0)
    for master in optimizer.masters:
        master.grad = torch.randn(master.shape, generator=draw, dtype=master.dtype)
    optimizer.masters[0].grad = optimizer.masters[0].grad.t().contiguous().t()
    before = [master.grad.clone() for master in optimizer.masters]

    world.add_gradients(optimizer)

    assert all(torch.equal(one.grad, 2 * old) for one, old in zip(optimizer.masters, before, strict=True))
    assert sum(messages) == sum(map(torch.numel, before))
    assert len(messages) < len(before)
    largest = max(map(torch.numel, before))
    assert all(size <= max(largest, 4000 // before[0].itemsize) for size in messages)


PROGRAM = """
import resource
from agentenv.training.learners.torch.memory import keep_freed_memory

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        bytearray(8 << 20)
        bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

untold = page_faults()
keep_freed_memory()
page_faults()
print(untold, page_faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_memory_is_used_again_without_page_faults():
    command = [sys.executable, "-c", PROGRAM]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    untold, told = map(int, said.split())
    assert untold > 1000
    assert told < untold / 100
