"""The loss sees the turn and the attempt of each token, and the KL term has a weight for each of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from agentenv.core import SequenceBuilder, StopReason, Trajectory, TrajectoryGroup, Turn
from agentenv.core.settings import build
from agentenv.training import GRPOConfig
from agentenv.training.batch import build_batch
from agentenv.training.learners.torch.passes import accumulate
from agentenv.training.metrics import Meter
from agentenv.training.step import assign_weights
from helpers.training import episode, loss_of, tiny_gpt2, trainer_of

ATTEMPTS = (0, 0, 1)
"""Attempts of the three turns of an episode."""


def played(member: int, reward: float, *, forked: bool = False) -> Trajectory:
    """An episode of three turns; if it was forked, the last turn lies in a sequence of its own."""
    draw = torch.Generator().manual_seed(member)
    sequences, turns = [SequenceBuilder()], []
    sequences[0].append("prompt", [1, 2, 3, 4])
    for index, attempt in enumerate(ATTEMPTS):
        if forked and index == 2:
            sequences.append(SequenceBuilder())
            sequences[1].append("prompt", [1, 2, 9], turn=1)
        builder, length = sequences[-1], 2 + (member + index) % 3
        ids = torch.randint(0, 61, (length,), generator=draw).tolist()
        place = {"sequence": len(sequences) - 1, "start": len(builder)}
        builder.append("model", ids, logprobs=[-3.0] * length, weights_version=0, turn=index)
        builder.append("env", [5, 6], turn=index)
        said = {"role": "assistant", "content": "x"}
        turns.append(Turn(index, said, "stop", length, attempt=attempt, **place))
    turns[-1] = replace(turns[-1], reward=reward)
    return Trajectory(
        "test/E-v0", "t", 0, "g", StopReason.FINAL_ANSWER, member=member, turns=tuple(turns),
        sequences=tuple(builder.freeze() for builder in sequences), reward=reward,
    )  # fmt: skip


GROUP = TrajectoryGroup((played(0, 1.0), played(1, 0.0, forked=True), played(2, 0.5)))


def fade(x):
    """A loss of one's own, in which later turns and attempts count less."""
    return -x.advantages_N * x.logprobs_N / (1 + x.turn_N + 10 * x.attempt_N)


def ours(loss_fn=None, **options) -> torch.Tensor:
    """The gradient of the trainer, whose model has moved away from the reference."""
    trainer = trainer_of(tiny_gpt2(), **{"beta": 0.3, "scale_rewards": "none"} | options)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.1)
    rows = trainer.grpo.batch([GROUP]).rows
    if trainer.learner.reference is not None:
        scored = zip(rows, trainer.learner.reference.score(rows), strict=True)
        rows = [replace(row, ref_n=ref_n) for row, ref_n in scored]
    rows = assign_weights(rows, trainer.config)
    accumulate(trainer.learner.policy, rows, Meter(), loss_fn=loss_fn)
    return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])


def truth(weight_of, surrogate) -> torch.Tensor:
    """The same in plain loops: token by token, each sequence alone."""
    reference, model = tiny_gpt2(), tiny_gpt2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    mean = sum(member.reward for member in GROUP) / 3
    count = sum(member.num_sampled_tokens for member in GROUP)
    loss = torch.zeros((), dtype=torch.float64)
    for member in GROUP:
        for sequence in member.sequences:
            ids = torch.tensor([sequence.token_ids])
            new, old = (torch.log_softmax(each(ids).logits[0], -1) for each in (model, reference))
            position = 0
            for span in sequence.spans:
                for token in span.token_ids:
                    if span.source == "model":
                        lp, ref = new[position - 1, token], old[position - 1, token].detach()
                        kl = torch.exp(ref - lp) - (ref - lp) - 1
                        weight = 0.3 * weight_of(span.turn, ATTEMPTS[span.turn])
                        advantage = member.reward - mean
                        loss = loss + (surrogate(lp, advantage, span.turn) + weight * kl) / count
                    position += 1
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def reinforce(lp, advantage, turn):
    return -advantage * (lp + 3.0).exp()


layouts = pytest.mark.parametrize(
    "layout",
    [{"packing": "shared"}, {"packing": "padded"}, {"packing": "padded", "tokens_per_micro_batch": 1}],
    ids=["packed", "padded", "alone"],
)


@layouts
@pytest.mark.parametrize(
    ("options", "weight_of"),
    [
        ({"beta": (0.3, 0.0)}, lambda turn, attempt: 1.0 if attempt == 0 else 0.0),
        ({"beta": (0.3, 0.075, 0.01875)}, lambda turn, attempt: 0.25**attempt),
        ({}, lambda turn, attempt: 1.0),
    ],
    ids=["first attempt", "each attempt", "unset"],
)
def test_kl_has_the_weight_of_its_attempt(options, weight_of, layout):
    gradient = ours(loss_type="reinforce", **options, **layout)

    expected = truth(weight_of, reinforce)
    assert ((gradient - expected).norm() / expected.norm()).item() < 1e-12


@layouts
def test_a_loss_of_ones_own_sees_turn_and_attempt_of_each_token(layout):
    gradient = ours(fade, **layout)

    def faded(lp, advantage, turn):
        return -advantage * lp / (1 + turn + 10 * ATTEMPTS[turn])

    expected = truth(lambda turn, attempt: 1.0, faded)
    assert ((gradient - expected).norm() / expected.norm()).item() < 1e-12


def test_kl_in_the_reward_has_the_same_weights():
    def advantages(beta) -> list[list[float]]:
        trainer = trainer_of(tiny_gpt2(), beta=beta, kl_in="reward", scale_rewards="none")
        return trainer.grpo.batch([GROUP]).advantages

    first = advantages((0.3, 0))
    (rest,), (whole,) = advantages((0, 0.3)), advantages(0.3)
    (plain,) = build_batch([GROUP], GRPOConfig(scale_rewards="none")).advantages

    halves = [one + other for one, other in zip(first[0], rest, strict=True)]
    assert halves == pytest.approx([one + other for one, other in zip(whole, plain, strict=True)], abs=1e-12)
    assert first[0] != pytest.approx(whole, abs=1e-3)


def test_tokens_recorded_without_a_turn_belong_to_the_first_one():
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2])
    builder.append("model", [3, 4], logprobs=[-1.0, -1.0], weights_version=0)
    members = [episode("t", member, float(member), tokens=2) for member in range(2)]
    members = [
        replace(one, turns=(replace(one.turns[0], start=2),), sequences=(builder.freeze(),))
        for one in members
    ]

    rows = build_batch([TrajectoryGroup(tuple(members))], GRPOConfig()).rows

    assert [[each.tolist() for each in row.indices()] for row in rows] == [[[0, 0], [0, 0]]] * 2


def test_one_token_by_hand():
    lp = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    places = {"turns": torch.tensor([0, 1, 2]), "attempts": torch.tensor([0, 0, 4])}

    loss = loss_of(lp, lp, lp * 0, beta=(1.0, 1.5), ref_logprobs=lp + 0.1, **places).loss

    assert loss.item() == pytest.approx(0.5 * (2 + 2 + 3) * (math.exp(0.1) - 1.1), abs=1e-12)


def test_coefficients_of_attempts_are_a_setting_of_the_command_line():
    config = build(GRPOConfig, {"beta": [1, 0]})

    assert config.loss.betas == GRPOConfig(beta=[1.0, 0.0]).loss.betas == (1.0, 0.0)
