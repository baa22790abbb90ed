"""KL to the reference in the reward: members that the model cannot score, and tokens that it does not have."""

from __future__ import annotations

import pytest

from agentenv.core import TrajectoryGroup, UsageError
from helpers.training import episode, tiny_gpt2, trainer_of


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_member_over_the_models_length_is_left_out_wherever_the_kl_is(kl_in):
    """GPT-2 has no position beyond its length, so scoring such a member would raise."""
    trainer = trainer_of(tiny_gpt2(), beta=0.5, kl_in=kl_in)
    members = (episode("a", 0, 1.0), episode("a", 1, 0.0), episode("a", 2, 9.0, tokens=130))

    metrics = trainer.step([TrajectoryGroup(members)])

    assert metrics["dropped/rows_too_long"] == 1
    assert metrics["updates"] == 1


def test_an_unknown_kl_leaves_a_member_out_of_the_statistics():
    options = {"beta": 0.5, "kl_in": "reward", "scale_rewards": "none"}
    members = (episode("a", 0, 1.0), episode("a", 1, 0.0), episode("a", 2, 9.0, tokens=130))

    with_long = trainer_of(tiny_gpt2(), **options).grpo.batch([TrajectoryGroup(members)])
    without = trainer_of(tiny_gpt2(), **options).grpo.batch([TrajectoryGroup(members[:2])])

    ours, truth = ([row.advantages_n.tolist() for row in batch.rows] for batch in (with_long, without))
    assert ours == truth


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_tokens_of_another_tokenizer_are_refused_wherever_the_kl_is(kl_in):
    trainer = trainer_of(tiny_gpt2(), beta=0.5, kl_in=kl_in)
    members = (episode("a", 0, 1.0), episode("a", 1, 0.0, top=500))

    with pytest.raises(UsageError, match="outside the model's vocabulary of 61"):
        trainer.step([TrajectoryGroup(members)])
