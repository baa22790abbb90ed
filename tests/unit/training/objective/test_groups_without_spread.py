"""Groups without spread cost no pass, and the weights of the other tokens count them as published."""

from __future__ import annotations

import pytest
import torch

from agentenv.core import TrajectoryGroup, UsageError
from agentenv.training import GRPOConfig, LossOptions
from helpers.training import episode, group, tiny_gpt2, trainer_of

REDUCTIONS = ("token_mean", "seq_mean", "constant", "prompt_mean")
MIXED = [0.0, 1.0, 0.5]


def groups(number: int):
    """One group with spread, and others of other lengths without any."""
    same = [group(f"same {index}", [0.25] * (2 + index % 3)) for index in range(number - 1)]
    return [*same[:2], group("mixed", MIXED), *same[2:]]


@pytest.fixture
def train_all(monkeypatch):
    """A function after whose call groups without spread are trained, too."""
    return lambda: monkeypatch.setattr(LossOptions, "trains_zero_std", property(lambda options: True))


def stepped(played, **options):
    trainer = trainer_of(tiny_gpt2(), max_completion_length=8, packing="padded", **options)
    metrics = trainer.step(played)
    return metrics, torch.cat([one.detach().flatten() for one in trainer.model.parameters()])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_leaving_them_out_changes_no_gradient(reduction, num_minibatches, train_all):
    options = {"reduction": reduction, "num_minibatches": num_minibatches}
    left_out, ours = stepped(groups(5), **options)
    train_all()
    trained, truth = stepped(groups(5), **options)

    assert left_out["tokens/trained"] < trained["tokens/trained"]
    assert left_out["grad_norm"] == pytest.approx(trained["grad_norm"], rel=1e-12)
    assert left_out["loss"] == pytest.approx(trained["loss"], rel=1e-12)
    assert left_out["mismatch/k3"] > 0
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_with_dynamic_sampling_one_mixed_group_of_sixteen_gets_the_whole_mean(reduction):
    played = groups(16)
    counts = {  # by hand: what the reduction divides by, over all groups and over the mixed one
        "token_mean": [sum(one.num_sampled_tokens for one in part) for part in played],
        "seq_mean": [len(part) for part in played],
        "constant": [len(part) for part in played],
        "prompt_mean": [1 for _ in played],
    }[reduction]

    counted, _ = stepped(played, reduction=reduction)
    kept, _ = stepped(played, reduction=reduction, refill_rounds=1)
    alone, _ = stepped([played[2]], reduction=reduction)

    assert kept["grad_norm"] == pytest.approx(counted["grad_norm"] * sum(counts) / counts[2], rel=1e-12)
    assert kept["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-12)
    assert kept["dropped/zero_std_episodes"] == counted["dropped/zero_std_episodes"] > 0


@pytest.mark.parametrize(
    ("options", "trains"),
    [
        ({}, False),
        ({"beta": 0.1}, True),
        ({"beta": 0.1, "kl_in": "reward"}, False),
        ({"entropy_coef": 0.1}, True),
        ({"loss_type": "distill", "teacher": "some/model"}, True),
    ],
)
def test_groups_without_spread_are_trained_where_the_loss_has_more_than_advantages(options, trains):
    assert GRPOConfig(**options).loss.trains_zero_std == trains


def test_rows_that_the_model_cannot_take_are_not_counted(train_all):
    played = [group("mixed", MIXED), group("same", [1.0] * 6)]  # the last rows of the second are longer
    longest = 6 + 5

    def norm():
        trainer = trainer_of(tiny_gpt2(), packing="padded")
        trainer.learner.policy.max_length = longest
        return trainer.step(played)["grad_norm"]

    left_out = norm()
    train_all()
    assert left_out == pytest.approx(norm(), rel=1e-12)


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
