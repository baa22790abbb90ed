"""The losses, as pure functions of tensors over trained tokens.

Notation: lp is the log-probability of a token under the trained policy at the sampling temperature, old under
the proximal policy, mu as the sampler reported it, ref under the reference; r = exp(lp - old); A is the
advantage; sg is stop-gradient. Each surrogate returns the loss of each token, `l_N`; the loss is
`sum(w_N * l_N)` with the weights of `agentenv.training.objective.weighting`.

The tests check these rules:

1. Values outside the loss mask are never read, so NaN or infinity there changes nothing.
2. The caller passes the weights: no function in this module divides by the size of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from agentenv.core.errors import UsageError
from agentenv.training.config import GRPOConfig
from agentenv.training.objective.weighting import correction_weights, off_policy_mask, sequence_mean
from agentenv.training.options.loss import LossOptions
from agentenv.training.rows import to_device

__all__ = ["SURROGATES", "LossInputs", "LossOutput", "grpo_loss", "kl_coefficients", "kl_penalty"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`. It is far beyond every clip, and exp() stays finite."""
SAPO_POSITIVE, SAPO_NEGATIVE = 1.0, 1.05
"""Temperatures of SAPO's gate by the sign of the advantage, as published: the gradient of what went badly
fades sooner."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a surrogate loss: the trained tokens of one micro-batch of whole sequences, flat.

    All tensors have the shape `[N]`, and a `loss_fn` must return a loss of that shape. It must not take sums
    or means over the batch, because the way the batch is split must not change the loss.
    """

    logprobs_N: Tensor
    """Log-probabilities under the trained policy; the only tensor with a gradient."""
    old_N: Tensor
    """Log-probabilities under the proximal policy."""
    sampler_N: Tensor
    """Log-probabilities as the sampler reported them."""
    ref_N: Tensor | None
    """Log-probabilities under the reference; None if there is no reference."""
    advantages_N: Tensor
    sequence_N: Tensor
    """Index of each token's sequence, from 0."""
    turn_N: Tensor
    """Index of each token's assistant turn in its episode, from 0. Tokens that were recorded without a turn
    have 0."""
    attempt_N: Tensor
    """Index of the attempt that each token belongs to, from 0; 0 everywhere if the environment marks none."""
    ratio_N: Tensor
    """exp(lp - old) of each token. For GSPO, each token has the geometric mean over its sequence."""
    config: GRPOConfig
    """The run's options."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss for the backward pass, with sums over tokens for the metrics."""

    loss: Tensor
    sums: dict[str, Tensor]
    """For each metric, its sum over the micro-batch's trained tokens."""
    extremes: dict[str, Tensor]
    """For each metric, its largest or smallest value in the micro-batch, as `metrics.EXTREMES` says."""
    num_tokens: int


def clipped(x: LossInputs) -> Tensor:
    """Return PPO's clipped surrogate: `-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`.

    Clip-higher is DAPO's. `delta` bounds r in the first term (INTELLECT-2, TRL), and with it the loss of a
    negative advantage by `-delta A`, as the dual clip of PPO does (verl, `clip_ratio_c`).
    """
    low, high = x.config.loss.clip
    bounded_N = x.ratio_N.clamp(1 - low, 1 + high)
    delta = x.config.loss.delta
    ratio_N = x.ratio_N if delta is None else x.ratio_N.clamp(max=delta)
    return -torch.min(ratio_N * x.advantages_N, bounded_N * x.advantages_N)


def cispo(x: LossInputs) -> Tensor:
    """Return CISPO: `-sg(min(r, epsilon_high)) A lp`; clipped tokens keep their gradient (MiniMax-M1)."""
    return -x.ratio_N.clamp(max=1 + x.config.loss.clip[1]).detach() * x.advantages_N * x.logprobs_N


def sapo(x: LossInputs) -> Tensor:
    """Return SAPO: `-(4 / tau) sigmoid(tau (r - 1)) A`, tau by the sign of A (arXiv 2511.20347)."""
    # Filled in, because `torch.where` makes float32 of two numbers, also where the ratios are float64.
    tau_N = torch.full_like(x.ratio_N, SAPO_NEGATIVE)
    tau_N = tau_N.masked_fill(x.advantages_N > 0, SAPO_POSITIVE)
    return -torch.sigmoid(tau_N * (x.ratio_N - 1)) * 4 / tau_N * x.advantages_N


def reinforce(x: LossInputs) -> Tensor:
    """Return importance-weighted REINFORCE without a clip: `-r A` (tinker's default)."""
    return -x.ratio_N * x.advantages_N


def policy_gradient(x: LossInputs) -> Tensor:
    """Return the plain policy gradient: `-lp A` (GPG)."""
    return -x.logprobs_N * x.advantages_N


def distill(x: LossInputs) -> Tensor:
    """Return on-policy distillation: `-r sg(ref - lp)`, with the teacher's log-probabilities as ref.

    On tokens that the policy sampled, the expected gradient is that of each token's reverse KL(policy ||
    teacher), as in GKD with beta = 1 (arXiv 2306.13649) and in "On-Policy Distillation" by Thinking Machines
    (2025). Advantages, and so rewards, are not used.
    """
    assert x.ref_N is not None  # the configuration asks for a teacher
    return -x.ratio_N * (x.ref_N - x.logprobs_N).detach()


def dppo(x: LossInputs) -> Tensor:
    """Return DPPO: `-r A`, but 0 for tokens whose probability moved too far (prime-rl, SkyRL).

    A token gets 0 if `p - p_mu > epsilon_high` (A > 0) or `p - p_mu < -epsilon` (A < 0). The bounds are on
    probabilities, not on ratios, so rare tokens may move by large factors.
    """
    low, high = x.config.loss.clip
    moved_N = x.logprobs_N.detach().exp() - x.sampler_N.exp()
    up_N = (x.advantages_N > 0) & (moved_N > high)
    down_N = (x.advantages_N < 0) & (moved_N < -low)
    return torch.where(up_N | down_N, torch.zeros_like(moved_N), -x.ratio_N * x.advantages_N)


def gmpo(x: LossInputs) -> Tensor:
    """Return GMPO: the sequence's geometric mean of clipped ratios (verl, `geo_mean`).

    The clip acts on log-ratios, against the sign of the advantage.
    """
    low, high = x.config.loss.clip
    log_ratio_N = (x.logprobs_N - x.old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sign_N = torch.sign(x.advantages_N)
    bounded_N = log_ratio_N.clamp(-low, high)
    kept_N = sign_N * torch.min(sign_N * log_ratio_N, sign_N * bounded_N)
    mean_N = sequence_mean(kept_N, x.sequence_N)
    return -mean_N.exp() * sequence_mean(x.advantages_N, x.sequence_N)


SURROGATES: dict[str, Callable[[LossInputs], Tensor]] = {
    "dapo": clipped,
    "grpo": clipped,
    "dr_grpo": clipped,
    "prompt_mean": clipped,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
    "dppo": dppo,
    "gmpo": gmpo,
    "gpg": policy_gradient,
    "distill": distill,
}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """Return an estimate of KL(policy || reference) at each token, with d = ref - lp.

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 (Schulman's estimators). As a loss, k2 has the gradient
    of the reverse KL; k1's is zero in expectation. |d| is clamped to 20 before `exp`.

    Raises:
        UsageError: The estimator is unknown.
    """
    d = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d * d / 2
    if estimator == "k3":
        return torch.exp(d) - d - 1
    raise UsageError(f"unknown KL estimator {estimator!r}", remedy="use one of k1, k2, k3")


def kl_coefficients(attempt_N: Tensor, options: LossOptions) -> Tensor:
    """Return the coefficient of the KL at each token: `beta` of its attempt."""
    betas = to_device(torch.tensor(options.betas, dtype=torch.float64), attempt_N.device)
    return betas[attempt_N.clamp(max=len(betas) - 1)]


def grpo_loss(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    config: GRPOConfig,
    loss_mask: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    turns: Tensor | None = None,
    attempts: Tensor | None = None,
    loss_fn: Callable[[LossInputs], Tensor] | None = None,
) -> LossOutput:
    """Return the weighted policy loss of whole sequences, with what the metrics need.

    The loss is `sum(w * (c * l + beta * kl - entropy_coef * H))`, where l is the surrogate, c the
    correction of `objective.weighting`, beta that of the token's attempt and H the entropy. All tensors have
    the same shape: `[B, T]`, or flat `[N]` with `sequence_ids`.

    Args:
        logprobs: lp, with gradient.
        old_logprobs: log-probabilities under the proximal policy.
        advantages: one number for each token.
        weights: one number for each token, normalised over the global batch.
        config: the loss's options.
        loss_mask: true on trained tokens; all are when None.
        sampler_logprobs: mu; old when None.
        ref_logprobs: of the reference; needed when `beta` acts in the loss.
        entropy: of the policy at each token; with gradient if `entropy_coef` is not 0.
        sequence_ids: the sequence of each token; the row index when None and 2-dimensional.
        turns: index of each token's assistant turn in its episode; 0 when None.
        attempts: index of the attempt that each token belongs to; 0 when None.
        loss_fn: the user's own surrogate instead of the configured one: `[N]` losses for N trained tokens.

    Raises:
        UsageError: `loss_fn` did not return one loss for each trained token.
    """
    trained = _trained_by(loss_mask)
    lp_N, old_N = trained(logprobs), trained(old_logprobs)
    if lp_N.numel() == 0:
        return LossOutput(lp_N.sum(), {}, {}, 0)
    sequence_N = _numbered(trained(_sequences(logprobs, sequence_ids)), lp_N.device)
    none_N = torch.zeros_like(sequence_N)
    x = LossInputs(
        logprobs_N=lp_N,
        old_N=old_N,
        sampler_N=old_N if sampler_logprobs is None else trained(sampler_logprobs),
        ref_N=None if ref_logprobs is None else trained(ref_logprobs),
        advantages_N=trained(advantages),
        sequence_N=sequence_N,
        turn_N=none_N if turns is None else trained(turns),
        attempt_N=none_N if attempts is None else trained(attempts),
        ratio_N=_ratio(lp_N - old_N, sequence_N, config),
        config=config,
    )
    return _weighted(x, trained(weights), None if entropy is None else trained(entropy), loss_fn)


def _weighted(
    x: LossInputs,
    weights_N: Tensor,
    entropy_N: Tensor | None,
    loss_fn: Callable[[LossInputs], Tensor] | None,
) -> LossOutput:
    """Return the weighted sum of the losses of the trained tokens."""
    c = x.config
    correction_N = correction_weights(x.old_N, x.sampler_N, x.sequence_N, c) * off_policy_mask(
        x.logprobs_N, x.sampler_N, x.advantages_N, x.sequence_N, c.stream.off_policy_mask_threshold
    )
    loss_N = _own_loss(loss_fn, x) if loss_fn else SURROGATES[c.loss.loss_type](x)
    total_N = loss_N * correction_N + _kl_term(x)
    if entropy_N is not None and c.loss.entropy_coef:
        total_N = total_N - c.loss.entropy_coef * entropy_N
    with torch.no_grad():
        sums, extremes = _observe(x, correction_N, entropy_N)
    return LossOutput((weights_N * total_N).sum(), sums, extremes, x.logprobs_N.numel())


def _own_loss(loss_fn: Callable[[LossInputs], Tensor], x: LossInputs) -> Tensor:
    """Return the user's own loss of each token, after a check of its shape.

    Without the check, a mean over the micro-batch would broadcast over the tokens without an error.
    """
    loss_N = cast("object", loss_fn(x))
    wanted = tuple(x.logprobs_N.shape)
    if isinstance(loss_N, Tensor) and tuple(loss_N.shape) == wanted:
        return loss_N
    given = f"shape {tuple(loss_N.shape)}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
    raise UsageError(
        f"loss_fn returned {given}",
        remedy=f"return one loss for each token, a tensor of shape {wanted} like logprobs_N, without a "
        "mean or sum: the tokens' weights are applied afterwards",
    )


def _sequences(logprobs: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """Return each token's sequence: `sequence_ids` if passed, else the row of `[B, T]`, else 0 for all."""
    if sequence_ids is not None:
        return sequence_ids
    rows = torch.arange(logprobs.shape[0])
    return rows[:, None].expand(logprobs.shape) if logprobs.dim() == 2 else torch.zeros_like(rows)


def _numbered(ids_N: Tensor, device: torch.device) -> Tensor:
    """Return ids as numbers from 0, on a device, for which ids in main memory do not wait."""
    return to_device(ids_N.unique(return_inverse=True)[1], device)


def _trained_by(mask: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a function that returns the values of the trained tokens, flat."""
    if mask is None:
        return torch.flatten
    index_N = mask.cpu().flatten().nonzero().squeeze(-1)
    return lambda values: values.flatten().index_select(0, to_device(index_N, values.device))


def _ratio(log_ratio_N: Tensor, sequence_N: Tensor, config: GRPOConfig) -> Tensor:
    """Return exp(lp - old), per token or per sequence as `importance_sampling_level` says."""
    if config.loss.importance_sampling_level == "sequence":
        log_ratio_N = sequence_mean(log_ratio_N, sequence_N)
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _kl_term(x: LossInputs) -> Tensor | float:
    """Return `beta * kl` of each token; 0 if the KL is not in the loss."""
    c = x.config.loss
    if x.ref_N is None or not c.has_kl or c.kl_in != "loss":
        return 0.0
    kl_N = kl_penalty(x.logprobs_N, x.ref_N, c.kl_estimator)
    beta_N = kl_coefficients(x.attempt_N, c).to(kl_N)
    return beta_N * (kl_N * x.ratio_N if c.use_bias_correction_kl else kl_N)


def _observe(
    x: LossInputs, correction_N: Tensor, entropy_N: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return sums and extremes for the metrics, with TRL's names where TRL has the metric.

    In TRL, `low_min` and `high_max` are taken over micro-batches. Here they are taken over sequences, so
    that they do not depend on how the batch is split.
    """
    c = x.config.loss
    low, high = c.clip
    low_N = (x.ratio_N < 1 - low) & (x.advantages_N < 0)
    high_N = (x.ratio_N > 1 + high) & (x.advantages_N > 0)
    gap_N = (x.logprobs_N - x.sampler_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    outside_N = (gap_N.exp() - 1).abs() > 0.2
    sums = {
        "clip_ratio/low_mean": low_N.sum(),
        "clip_ratio/high_mean": high_N.sum(),
        "clip_ratio/region_mean": (low_N | high_N).sum(),
        "ratio/mean": x.ratio_N.sum(),
        "policy_confidence": x.logprobs_N.exp().sum(),
        "logprobs/new_mean": x.logprobs_N.sum(),
        "logprobs/old_mean": x.old_N.sum(),
        "mismatch/k1": -gap_N.sum(),
        "mismatch/k3": (gap_N.exp() - gap_N - 1).sum(),
        "mismatch/frac_outside": outside_N.sum(),
        "importance/weight_mean": correction_N.sum(),
        "importance/frac_dropped": (correction_N == 0).sum(),
    }
    if x.ref_N is not None:
        sums["kl"] = kl_penalty(x.logprobs_N, x.ref_N, c.kl_estimator).sum()
    if entropy_N is not None:
        sums["entropy"] = entropy_N.sum()
    return sums, {
        "clip_ratio/low_min": sequence_mean(low_N.to(gap_N), x.sequence_N).min(),
        "clip_ratio/high_max": sequence_mean(high_N.to(gap_N), x.sequence_N).max(),
        "mismatch/abs_max": gap_N.abs().max(),
        "ratio/max": x.ratio_N.max(),
    }
