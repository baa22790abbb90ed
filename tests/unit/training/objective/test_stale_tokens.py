"""Tokens of older weights are left out one by one, or corrected."""

from __future__ import annotations

import pytest
import torch

from agentenv.core import SequenceBuilder, StopReason, Trajectory, TrajectoryGroup, Turn
from agentenv.training import GRPOConfig
from agentenv.training.batch import build_batch
from agentenv.training.learners.torch.passes import accumulate
from agentenv.training.step import assign_weights
from agentenv.training.sums import Meter
from helpers.training import tiny_gpt2, trainer_of


def across(member: int, reward: float, versions: list[int | None]) -> Trajectory:
    """An episode of one turn, each two tokens of which were sampled by other weights."""
    builder, draw = SequenceBuilder(), torch.Generator().manual_seed(member)
    builder.append("prompt", [1, 2, 3])
    for version in versions:
        ids = torch.randint(0, 61, (2,), generator=draw).tolist()
        builder.append("model", ids, logprobs=[-2.0, -2.5], weights_version=version, turn=0)
    count = 2 * len(versions)
    said = {"role": "assistant", "content": "x"}
    return Trajectory(
        "test/E-v0", "t", 0, "g", StopReason.FINAL_ANSWER, member=member, reward=reward,
        turns=(Turn(0, said, "stop", count, start=3, reward=reward),), sequences=(builder.freeze(),),
    )  # fmt: skip


GROUP = TrajectoryGroup((across(0, 1.0, [3, 4, 5]), across(1, 0.0, [3, 3]), across(2, 0.5, [None, 4])))


@pytest.mark.parametrize(
    ("most", "positions", "left_out"),
    [
        (None, [[3, 4, 5, 6, 7, 8], [3, 4, 5, 6], [3, 4, 5, 6]], None),
        (2, [[3, 4, 5, 6, 7, 8], [3, 4, 5, 6], [3, 4, 5, 6]], 0.0),
        (1, [[5, 6, 7, 8], [3, 4, 5, 6]], 6.0),
        (0, [[7, 8], [3, 4]], 10.0),
    ],
)
def test_tokens_of_older_weights_are_left_out_and_counted(most, positions, left_out):
    batch = build_batch([GROUP], GRPOConfig(max_token_staleness=most), weights_version=5)

    assert [row.positions_n.tolist() for row in batch.rows] == positions
    assert batch.metrics.get("tokens/stale") == left_out
    # The whole group counts in the statistics, also a member of which nothing is trained.
    assert batch.advantages == build_batch([GROUP], GRPOConfig(), weights_version=5).advantages


def gradient(rows, trainer) -> torch.Tensor:
    assign_weights(rows, trainer.config)
    accumulate(trainer.learner.policy, rows, Meter())
    return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize("packing", ["shared", "padded"])
def test_the_gradient_is_that_of_the_new_tokens_in_their_whole_context(packing):
    options = {"loss_type": "reinforce", "scale_rewards": "none", "packing": packing}
    masked = trainer_of(tiny_gpt2(), max_token_staleness=1, **options)
    rows = build_batch([GROUP], masked.config, weights_version=5).rows
    ours = gradient(rows, masked)

    model = tiny_gpt2()
    loss = torch.zeros((), dtype=torch.float64)
    for member, first in ((0, 5), (2, 3)):
        ids = GROUP[member].sequences[0].token_ids
        log_p = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        for position in range(first, len(ids)):
            sampler = -2.0 if (position - 3) % 2 == 0 else -2.5
            ratio = (log_p[position - 1, ids[position]] - sampler).exp()  # corrects for the older weights
            loss = loss - ratio * (GROUP[member].reward - 0.5) / 8
    loss.backward()
    truth = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    assert ((ours - truth).norm() / truth.norm()).item() < 1e-12
