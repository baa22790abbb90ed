"""Corrections for a sampler whose probabilities differ from the trainer's: TIS, MIS and OPSM.

rho = exp(old - mu) is the ratio of the proximal policy to the sampler. No weight has a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentenv.training.config import GRPOConfig
from agentenv.training.objective.loss_inputs import LossInputs, sequence_mean

__all__ = ["correction_weights", "off_policy_mask"]

MAX_LOG_RHO = 20.0


def correction_weights(old_N: Tensor, sampler_N: Tensor, sequence_N: Tensor, config: GRPOConfig) -> Tensor:
    """Return, for each token's loss, the factor that corrects for the sampler.

    - `token_truncate` (TIS): min(rho, cap);
    - `token_mask` (MIS, IcePop): rho where 1 / cap <= rho <= cap, else 0;
    - `sequence_truncate`, `sequence_mask`: the same with the sequence's product of rho.

    The names are TRL's (`vllm_importance_sampling_mode`). A sequence's product grows with its length:
    in bfloat16 it reaches 2.7 after 54 tokens on identical weights, so prefer the token modes.
    """
    if config.correction == "off":
        return torch.ones_like(old_N)
    level, mode = config.correction.split("_")
    log_rho_N = (old_N - sampler_N).detach()
    if level == "sequence":
        sums_S = log_rho_N.new_zeros(int(sequence_N.max()) + 1).index_add(0, sequence_N, log_rho_N)
        log_rho_N = sums_S[sequence_N]
    rho_N = log_rho_N.clamp(-MAX_LOG_RHO, MAX_LOG_RHO).exp()
    if mode == "truncate":
        return rho_N.clamp(max=config.importance_cap)
    inside_N = (rho_N >= 1 / config.importance_cap) & (rho_N <= config.importance_cap)
    return torch.where(inside_N, rho_N, torch.zeros_like(rho_N))


def off_policy_mask(x: LossInputs) -> Tensor:
    """Return 0 for sequences with a negative advantage that the policy has drifted away from, else 1.

    OPSM (slime, TRL's `off_policy_mask_threshold`): a sequence is left out if A < 0 and the mean of
    mu - lp over it is above the threshold.
    """
    threshold = x.config.off_policy_mask_threshold
    if threshold is None:
        return torch.ones_like(x.old_N)
    drift_N = sequence_mean(x.sampler_N - x.logprobs_N.detach(), x.sequence_N)
    left_N = (x.advantages_N < 0) & (drift_N > threshold)
    return torch.where(left_N, torch.zeros_like(drift_N), torch.ones_like(drift_N))
