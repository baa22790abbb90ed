"""Losses, weights and log-probabilities against numbers by hand, analytic gradients and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentenv.training import group_advantages, kl_penalty, token_weights
from agentenv.training.learners.torch.logprob import chunked_logprobs
from agentenv.training.objective import loss as losses
from helpers.training import loss_of

DTYPE = torch.float64
REDUCTIONS = ("token_mean", "seq_mean", "constant", "prompt_mean")


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DTYPE)


def taught(lp: torch.Tensor, *args, **options) -> tuple[float, list[float]]:
    """The loss of tokens and its gradient."""
    lp = lp.detach().requires_grad_()
    output = loss_of(lp, *args, **options)
    output.loss.backward()
    return output.loss.item(), lp.grad.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "high", "loss", "gradient"),
    [
        (1.2, 1.0, 0.28, -1.2, -1.2),
        (1.2, 1.0, 0.1, -1.1, 0.0),
        (0.7, -1.0, 0.28, 0.8, 0.0),
        (2.0, -1.0, 0.28, 2.0, 2.0),
    ],
)
def test_one_token_by_hand(ratio, advantage, high, loss, gradient):
    old = tensor(math.log(0.3))

    value, grad = taught(old + math.log(ratio), old, tensor(advantage), epsilon=0.2, epsilon_high=high)

    assert (value, grad) == (pytest.approx(loss, abs=1e-12), pytest.approx([gradient], abs=1e-12))


@pytest.mark.parametrize(("kind", "kl"), [("k1", -0.1), ("k2", 0.005), ("k3", math.exp(0.1) - 1.1)])
def test_kl_estimators_by_hand(kind, kl):
    assert kl_penalty(tensor(-1.0), tensor(-0.9), kind).item() == pytest.approx(kl, abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "kl", "slope"), [("k1", -0.5, 1.0), ("k2", 0.125, -0.5), ("k3", 0.1487213, -0.6487213)]
)
def test_the_chosen_kl_estimator_is_what_the_loss_adds(estimator, kl, slope):
    options = {"beta": 0.1, "kl_estimator": estimator, "ref_logprobs": tensor(-0.5)}

    value, grad = taught(tensor(-1.0), tensor(-1.0), tensor(0.0), **options)

    assert (value, grad) == (pytest.approx(0.1 * kl, abs=1e-8), pytest.approx([0.1 * slope], abs=1e-8))


@pytest.mark.parametrize(
    ("before", "after", "advantage", "loss"),
    [
        (0.3, 0.6, 1.0, 0.0),  # up by more than 0.2
        (0.6, 0.4, -1.0, 0.0),  # down by more than 0.1
        (0.6, 0.3, 1.0, -0.5),
        (0.3, 0.6, -1.0, 2.0),
        (0.01, 0.15, 1.0, -15.0),  # a ratio of 15, but a small change
        (0.15, 0.1, -1.0, 2 / 3),
    ],
)
def test_dppo_leaves_out_what_moved_too_far_by_hand(before, after, advantage, loss):
    options = {"loss_type": "dppo", "epsilon": 0.1, "epsilon_high": 0.2}

    value, grad = taught(tensor(after).log(), tensor(before).log(), tensor(advantage), **options)

    # Of r A, the slope in lp is r A itself.
    assert [value, *grad] == pytest.approx([loss, loss], abs=1e-12)


@pytest.mark.parametrize(
    ("advantage", "kept", "slopes"),
    [(1.0, [0.28, math.log(0.5)], [0.0, 1.0]), (-1.0, [math.log(2.0), -0.2], [1.0, 0.0])],
)
def test_gmpo_clips_log_ratios_by_hand(advantage, kept, slopes):
    old, both = tensor(-2.0, -2.0), tensor(advantage, advantage)

    value, grad = taught(
        old + tensor(2.0, 0.5).log(), old, both, loss_type="gmpo", epsilon=0.2, epsilon_high=0.28
    )

    each = -advantage * math.exp(sum(kept) / 2)  # at both tokens of the one sequence
    assert value == pytest.approx(2 * each, abs=1e-12)
    assert grad == pytest.approx([each * slope for slope in slopes], abs=1e-12)


def test_a_clip_is_counted_only_where_the_sign_of_the_advantage_makes_it_act():
    ratio, advantages = tensor(0.5, 0.5, 0.5, 2.0, 2.0, 2.0, 1.0), tensor(-1, 1, 1, 1, 1, -1, -1)

    sums = loss_of(ratio.log(), torch.zeros_like(ratio), advantages).sums

    assert [sums[f"clip_ratio/{name}_mean"].item() for name in ("low", "high", "region")] == [1, 2, 3]


def test_confidence_and_mean_logprobs_are_of_the_trained_tokens():
    new, old = tensor(0.5, 0.25, 0.9).log(), tensor(0.4, 0.5, 0.1).log()

    output = loss_of(new, old, loss_mask=torch.tensor([True, True, False]))

    means = {name: value.item() / output.num_tokens for name, value in output.sums.items()}
    assert means["policy_confidence"] == pytest.approx(0.375)
    assert means["logprobs/new_mean"] == pytest.approx(math.log(0.5 * 0.25) / 2)
    assert means["logprobs/old_mean"] == pytest.approx(math.log(0.4 * 0.5) / 2)


@given(st.permutations(range(6)))
def test_the_extreme_clip_shares_are_of_whole_sequences(order):
    # Clipped low: half of the first sequence, all of the second. Clipped high: a third of the last.
    ratio, advantages = tensor(0.5, 1.0, 0.5, 2.0, 1.0, 1.0), tensor(-1, -1, -1, 1, 1, 1)
    sequences = torch.tensor([0, 0, 1, 2, 2, 2])

    def extremes(kept: list[int]) -> dict[str, float]:
        old = torch.zeros(len(kept), dtype=DTYPE)
        found = loss_of(ratio[kept].log(), old, advantages[kept], sequence_ids=sequences[kept]).extremes
        return {name: value.item() for name, value in found.items() if name.startswith("clip_ratio")}

    assert extremes(list(order)) == pytest.approx({"clip_ratio/low_min": 0, "clip_ratio/high_max": 1 / 3})
    assert extremes([n for n in order if n < 3]) == {"clip_ratio/low_min": 0.5, "clip_ratio/high_max": 0}


def random_tokens(seed: int, count: int = 200):
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=DTYPE) * scale

    old = draw(1.0) - 2
    return old + draw(0.3), old, draw(1.0), draw(1.0).abs()


@given(st.integers(0, 10_000))
def test_gradient_is_the_analytic_one(seed):
    lp, old, advantages, weights = random_tokens(seed)
    ratio = (lp - old).exp()
    clipped = ((advantages > 0) & (ratio > 1.28)) | ((advantages < 0) & (ratio < 0.8))
    whole = -ratio * advantages * weights

    _, grad = taught(lp, old, advantages, weights, epsilon=0.2, epsilon_high=0.28)
    _, plain = taught(lp, old, advantages, weights, loss_type="reinforce")

    torch.testing.assert_close(tensor(*grad), torch.where(clipped, 0.0, whole), rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(tensor(*plain), whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("advantage", "tau"), [(1.0, 1.1), (-1.0, 1.05)])
def test_sapo_keeps_its_temperature_to_the_last_bit(advantage, tau, monkeypatch):
    monkeypatch.setattr(losses, "SAPO_POSITIVE", 1.1)
    ratio = 1.3
    loss, _ = taught(tensor(math.log(ratio)), tensor(0.0), tensor(advantage), loss_type="sapo")

    assert loss == pytest.approx(-4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage, rel=1e-14)


@pytest.mark.parametrize(
    ("loss_type", "differentiable"),
    [*((name, True) for name in ("dapo", "sapo", "reinforce", "gmpo", "gpg", "dppo")), ("cispo", False)],
)
def test_gradcheck_away_from_kinks(loss_type, differentiable):
    torch.manual_seed(0)
    old = torch.randn(6, dtype=DTYPE) * 0.2 - 2
    # Far from 1 - epsilon, 1 and 1 + epsilon, so that a finite difference crosses no kink.
    lp = (old + tensor(-0.5, -0.1, 0.1, 0.5, 0.15, -0.15)).requires_grad_()
    advantages = tensor(1.0, -1.0, 1.0, -1.0, 0.5, -0.5)

    def run(x: torch.Tensor) -> torch.Tensor:
        return loss_of(x, old, advantages, loss_type=loss_type).loss

    # The ratio of CISPO is a constant factor, through which no gradient goes.
    assert torch.autograd.gradcheck(run, (lp,), raise_exception=False) == differentiable


LENGTHS = [3, 50, 7, 20]
ROWS = list(zip(*(each.split(LENGTHS) for each in random_tokens(1, sum(LENGTHS))[:3]), strict=True))


def gradient_of(parts: list[list[int]], weights: list[float]) -> torch.Tensor:
    """The gradient of rows that come in parts, each row with a weight for its tokens."""
    leaves = [lp.clone().requires_grad_() for lp, _, _ in ROWS]
    for part in parts:
        old, advantages = (torch.cat([ROWS[row][place] for row in part]) for place in (1, 2))
        each = torch.cat([torch.full_like(ROWS[row][0], weights[row]) for row in part])
        loss_of(torch.cat([leaves[row] for row in part]), old, advantages, each).loss.backward()
    return torch.cat([leaf.grad for leaf in leaves])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("split", [[[0, 1], [2, 3]], [[0], [1], [2], [3]], [[2, 0, 3], [1]]])
def test_accumulation_does_not_change_the_gradient(reduction, split):
    weights = token_weights(LENGTHS, reduction=reduction, groups=[0, 0, 1, 1], max_tokens=64)

    whole, parts = gradient_of([[0, 1, 2, 3]], weights), gradient_of(split, weights)

    assert ((whole - parts).norm() / whole.norm()).item() <= 1e-12


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_on_policy_ratio_is_exactly_one(loss_type):
    lp, _, advantages, weights = random_tokens(3)

    output = loss_of(lp, lp, advantages, weights, loss_type=loss_type)

    assert output.sums["ratio/mean"].item() == len(lp)
    assert output.loss.item() == -(weights * advantages).sum().item()


def test_the_heads_gradient_is_summed_in_float32_under_bfloat16():
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(4, 1, dtype=torch.bfloat16, requires_grad=True)

    logprobs, _ = chunked_logprobs(hidden, weight, torch.zeros(1024, dtype=torch.long), chunk=1)
    logprobs.sum().backward()

    # 1024 times 1 - 1/4 and -1/4; a sum in bfloat16 stands still at 256 and -64.
    assert weight.grad.flatten().tolist() == [768.0, -256.0, -256.0, -256.0]


@given(st.integers(0, 1000), st.sampled_from([0.0, 7.5, math.nan, math.inf, -math.inf]))
def test_what_is_masked_changes_nothing_and_what_is_not_does(seed, poison):
    lp, old, advantages, weights = (t.reshape(4, 50) for t in random_tokens(seed))
    mask = torch.rand(4, 50, generator=torch.Generator().manual_seed(seed)) > 0.4
    options = {"beta": 0.1, "importance_correction": "sequence_truncate", "old_logprobs": "recompute"}
    options |= {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "off_policy_mask_threshold": 0.1,
    }

    def run(value: float | None):
        def spoil(t: torch.Tensor) -> torch.Tensor:
            return t if value is None else torch.where(mask, t, torch.full_like(t, value))

        leaf = spoil(lp).detach().clone().requires_grad_()
        others = {"sampler_logprobs": spoil(old + 0.05), "ref_logprobs": spoil(old + 0.1)}
        others |= {"entropy": spoil(lp.abs()), "loss_mask": mask}
        # `old_logprobs` is an option and a tensor of the loss, which is the second argument here.
        output = loss_of(leaf, spoil(old), spoil(advantages), spoil(weights), **options, **others)
        output.loss.backward()
        return output, leaf.grad

    (clean, clean_grad), (spoiled, spoiled_grad) = run(None), run(poison)
    assert spoiled.loss.item() == clean.loss.item()
    assert torch.equal(spoiled_grad, clean_grad)
    assert {k: v.item() for k, v in spoiled.sums.items()} == {k: v.item() for k, v in clean.sums.items()}
    assert (
        loss_of(lp + 0.5 * mask, old, advantages, weights, loss_mask=mask).loss
        != loss_of(lp, old, advantages, weights, loss_mask=mask).loss
    )


@pytest.mark.parametrize(
    "rewards",
    [[[1.0, 1.0, 1.0]], [[0.1] * 7], [[1.0]], [[None, 1.0]], [[math.nan, 2.0]], [[None, None]], [[]], []],
)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_rewards_without_spread_give_exactly_zero(rewards, scale, kind):
    values = group_advantages(rewards, advantage=kind, scale_rewards=scale)
    assert [list(group) for group in values] == [[0.0] * len(group) for group in rewards]


def test_everything_masked_is_a_loss_of_zero():
    lp = tensor(-1.0, -2.0)

    assert taught(lp, lp, lp, lp, loss_mask=torch.zeros(2, dtype=torch.bool)) == (0.0, [0.0, 0.0])
    assert loss_of(lp, lp, loss_mask=torch.zeros(2, dtype=torch.bool)).num_tokens == 0


def share(reduction, lengths, episodes, groups) -> float:
    """Which weight the first episode has."""
    weights = token_weights(lengths, reduction=reduction, episodes=episodes, groups=groups, max_tokens=64)
    return sum(w * n for w, n, e in zip(weights, lengths, episodes, strict=True) if e == 0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@given(parts=st.lists(st.integers(1, 40), min_size=1, max_size=5), other=st.integers(1, 90))
def test_a_forked_episode_keeps_its_weight(reduction, parts, other):
    whole = share(reduction, [sum(parts), other], [0, 1], [0, 0])
    forked = share(reduction, [*parts, other], [0] * len(parts) + [1], [0] * (len(parts) + 1))

    assert forked == pytest.approx(whole, abs=1e-12)
