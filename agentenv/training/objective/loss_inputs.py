"""The inputs of a surrogate loss and of the corrections for the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentenv.training.config import GRPOConfig

__all__ = ["LossInputs", "kl_factors", "sequence_mean"]


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


def sequence_mean(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Return, at each token, the mean of the values over the token's sequence."""
    num_sequences = int(sequence_N.max()) + 1
    sums_S = values_N.new_zeros(num_sequences).index_add(0, sequence_N, values_N)
    counts_S = values_N.new_zeros(num_sequences).index_add(0, sequence_N, torch.ones_like(values_N))
    return (sums_S / counts_S.clamp(min=1))[sequence_N]


def kl_factors(attempt_N: Tensor, config: GRPOConfig) -> Tensor | None:
    """Return the factor of `beta` at each token, as `kl_weights` says; None if it is 1 everywhere."""
    if not config.kl_weights:
        return None
    weights = torch.tensor(config.kl_weights, dtype=torch.float64, device=attempt_N.device)
    return weights[attempt_N.clamp(max=len(weights) - 1)]
