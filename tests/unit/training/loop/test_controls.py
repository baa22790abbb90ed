"""Negative controls of the numeric checks: what is wrong must be seen to be wrong."""

from __future__ import annotations

import pytest
import torch

from agentenv.training import GRPOConfig, grpo_loss, token_weights
from agentenv.training.learners.torch.logprob import chunked_logprobs, plain_logprobs
from helpers.training import group, trainer_of

DTYPE = torch.float64


def tokens(seed: int = 0, count: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    old = torch.randn(count, generator=draw, dtype=DTYPE) - 2
    lp = (old + torch.randn(count, generator=draw, dtype=DTYPE) * 0.4).requires_grad_()
    advantages = torch.randn(count, generator=draw, dtype=DTYPE)
    return lp, old, advantages, torch.full((count,), 1 / count, dtype=DTYPE)


def gradient(**options) -> torch.Tensor:
    lp, old, advantages, weights = tokens()
    grpo_loss(
        lp, old_logprobs=old, advantages=advantages, weights=weights, config=GRPOConfig(**options)
    ).loss.backward()
    return lp.grad


def test_without_the_clip_the_analytic_gradient_is_another():
    lp, old, advantages, weights = tokens()
    unclipped = -(lp.detach() - old).exp() * advantages * weights
    assert (gradient() - unclipped).abs().max() > 1e-3
    torch.testing.assert_close(gradient(loss_type="reinforce"), unclipped, rtol=0, atol=1e-15)


def test_gradcheck_notices_a_stop_gradient():
    lp, old, advantages, weights = tokens(count=6)

    def run(x: torch.Tensor) -> torch.Tensor:
        config = GRPOConfig(loss_type="cispo")
        return grpo_loss(x, old_logprobs=old, advantages=advantages, weights=weights, config=config).loss

    assert not torch.autograd.gradcheck(run, (lp,), raise_exception=False)


@pytest.mark.parametrize("other", ["cispo", "sapo", "gpg", "gmpo"])
def test_another_loss_has_another_gradient(other):
    assert (gradient() - gradient(loss_type=other)).abs().max() > 1e-3


def test_a_policy_that_moved_has_another_ratio():
    batch = [group("a", [0.0, 1.0, 0.3])]
    trainer = trainer_of(old_logprobs="recompute", num_iterations=2, learning_rate=0.01)
    assert trainer.step(batch)["ratio/mean"] != 1.0


def test_an_old_policy_gives_another_loss():
    lp, old, advantages, weights = tokens()
    output = grpo_loss(lp, old_logprobs=old, advantages=advantages, weights=weights, config=GRPOConfig())
    assert output.sums["ratio/mean"].item() != len(lp)
    assert abs(output.loss.item() + (weights * advantages).sum().item()) > 1e-3


def test_without_the_optimisers_state_a_resume_is_not_equal(tmp_path):
    batches = [[group(f"{step}", [0.0, 1.0, 0.5])] for step in range(4)]
    whole = trainer_of()
    for batch in batches[:2]:
        whole.step(batch)
    whole.save(tmp_path / "half")
    forgetful = trainer_of()
    forgetful.resume(tmp_path / "half")
    forgetful.learner._optimizer = None
    for batch in batches[2:]:
        whole.step(batch)
        forgetful.step(batch)
    pairs = zip(forgetful.model.parameters(), whole.model.parameters(), strict=True)
    assert not all(torch.equal(ours, truth) for ours, truth in pairs)


def test_the_temperature_and_the_soft_cap_count():
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 8, generator=draw, dtype=DTYPE)
    weight = torch.randn(30, 8, generator=draw, dtype=DTYPE)
    labels = torch.randint(0, 30, (20,), generator=draw)
    truth, _ = plain_logprobs(hidden @ weight.T, labels, temperature=0.7)
    for options in ({"temperature": 1.0}, {"temperature": 0.7, "softcap": 2.0}):
        wrong, _ = chunked_logprobs(hidden, weight, labels, chunk=7, **options)
        assert (wrong - truth).abs().max() > 1e-2


def test_a_number_inside_the_mask_counts():
    lp, old, advantages, weights = tokens()
    mask = torch.ones(40, dtype=torch.bool)
    mask[20:] = False
    config = GRPOConfig()

    def loss(spoiled: int) -> float:
        moved = old.clone()
        moved[spoiled] += 0.5
        return grpo_loss(
            lp, old_logprobs=moved, advantages=advantages, weights=weights, config=config, loss_mask=mask
        ).loss.item()

    assert loss(30) == loss(35)
    assert loss(3) != loss(30)


def test_a_group_with_spread_makes_a_step():
    assert trainer_of().step([group("a", [0.0, 1.0])])["updates"] == 1


@pytest.mark.parametrize("reduction", ["seq_mean", "constant"])
def test_counted_by_rows_a_fork_changes_an_episodes_weight(reduction):
    def share(episodes) -> float:
        weights = token_weights([10, 30, 20], reduction=reduction, episodes=episodes, max_tokens=64)
        return weights[0] * 10 + weights[1] * 30

    assert share(None) != pytest.approx(share([0, 0, 1]), abs=1e-3)
