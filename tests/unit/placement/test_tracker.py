"""The tracker counts the bytes that a device holds."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard

from agentenv.placement.dry_run import MemoryTracker, _ranks


def test_a_sharded_tensor_counts_with_the_part_of_one_rank_only():
    with _ranks(4) as mesh:
        given = DTensor.from_local(torch.zeros(8, dtype=torch.bfloat16), mesh, [Shard(0)], run_check=False)
        tracker = MemoryTracker([given.to_local()])
        with tracker.counting():
            wide = given.float()
            held = tracker.held

    assert wide.shape == (32,)
    assert held == 8 * 4


def test_what_was_there_already_does_not_count_and_what_is_freed_no_longer():
    given = torch.zeros(8)
    tracker = MemoryTracker([given])

    with tracker.counting():
        given.add_(1)
        made = given + given[:4].sum()
        held = tracker.held
        del made
        left = tracker.held

    assert (held, left) == (8 * 4, 0)
