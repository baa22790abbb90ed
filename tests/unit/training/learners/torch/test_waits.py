"""The host waits for the device after the last pass alone: a pass over a micro-batch reads nothing from it.

The passes run on PyTorch's `meta` device, whose tensors have no numbers, so that any reading raises.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import masking_utils

from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import Policy, flex
from agentenv.training.learners.torch.packing import pack_rows, pad_rows
from agentenv.training.learners.torch.passes import ExpertLoad, _backward
from agentenv.training.metrics import Meter
from agentenv.training.rows import TokenSupports
from helpers.training import make_row, tiny

ROWS = [make_row(list(range(1, 11)), [5, 9], group=number) for number in range(4)]
RECOMPUTED = {"old_logprobs": "recompute", "num_iterations": 2}
SUPPORTS = TokenSupports(torch.tensor([5, 6, 1, 9, 10], dtype=torch.int32), torch.tensor([2, 3]))


def rows_with(**fields):
    return [replace(row, **fields) for row in ROWS]


CASES = {
    "plain": (ROWS, {}),
    "demonstrations beside episodes": ([*ROWS, *rows_with(demonstration=True)], {}),
    "demonstrations alone": (rows_with(demonstration=True), {}),
    "reference": (rows_with(ref_n=torch.zeros(2)), {"beta": 0.1}),
    "betas of attempts": (rows_with(ref_n=torch.zeros(2)), {"beta": (0.1, 0.2)}),
    "entropy": (ROWS, {"entropy_coef": 0.1}),
    "ratio of a sequence": (ROWS, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "mean of a sequence": (ROWS, {"loss_type": "gmpo"}),
    "corrected sequence": (
        rows_with(old_n=torch.zeros(2)),
        {"importance_correction": "sequence_mask", **RECOMPUTED},
    ),
    "off-policy mask": (ROWS, {"off_policy_mask_threshold": 0.1}),
    "checkpoints": (ROWS, {"gradient_checkpointing": True}),
    "cut distributions": (rows_with(supports=SUPPORTS), {}),
}


def attention(query, key, value, **options):
    return query * key.mean() * value.mean()


def policy_on_meta(model, monkeypatch, **options) -> Policy:
    # Of rows without a mask, transformers itself asks whether their positions are those of a pack.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_: None)
    # Flex attention runs on no device without numbers; its result has the shape of the queries.
    monkeypatch.setattr(flex, "_kernel", lambda _: attention)
    policy = Policy(model, GRPOConfig(**options))
    policy.model.to("meta")
    policy.device, policy.way = torch.device("meta"), "flex"
    return policy


@pytest.mark.parametrize("layout", [pad_rows, pack_rows])
@pytest.mark.parametrize("case", CASES)
def test_a_pass_with_its_loss_and_gradients_reads_nothing_from_the_device(case, layout, monkeypatch):
    rows, options = CASES[case]
    policy = policy_on_meta(tiny(dtype=torch.float32), monkeypatch, **options)
    load = ExpertLoad(policy, 10.0)
    loss, scores = _backward(policy, layout(rows), Meter(), load, loss_fn=None, moved=False)

    assert loss.is_meta
    assert all(score.is_meta for pair in scores for score in pair)
    assert all(one.grad is not None for one in policy.model.parameters())
