"""One weight per token: every normalisation of the loss, computed once over the global batch.

The loss is `sum_t w_t * l_t`. The weights `w_t` are computed over the whole optimiser step (all
micro-batches, all ranks), so splitting the sum in any way cannot change it. The usual mean of micro-batch
means is off by more than a tenth on ordinary batches. SkyRL multiplies its reductions into the advantages
for the same reason.

A sampler whose probabilities differ from the trainer's is corrected by a factor for each token, from
rho = exp(old - mu), the ratio of the proximal policy to the sampler (TIS, MIS and OPSM). No factor has a
gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from agentenv.core.errors import UsageError
from agentenv.training.config import GRPOConfig
from agentenv.training.options.loss import Reduction

__all__ = ["correction_weights", "off_policy_mask", "sequence_mean", "token_weights"]

MAX_LOG_RHO = 20.0
"""Log-ratios are clamped to this before `exp`, so that no weight is infinite."""


def token_weights(
    lengths: Sequence[int],
    *,
    reduction: Reduction,
    episodes: Sequence[Hashable] | None = None,
    groups: Sequence[Hashable] | None = None,
    max_tokens: int | None = None,
    total: Callable[[float], float] = float,
) -> list[float]:
    """Return the weight of every trained token of each row.

    - `token_mean`: 1 / N, N trained tokens in all (DAPO);
    - `seq_mean`: 1 / (E * tokens of the row's episode) (GRPO);
    - `constant`: 1 / (E * max_tokens) (Dr.GRPO);
    - `prompt_mean`: 1 / (P * tokens of the row's group) (SkyRL).

    E and P count the episodes and groups that have a trained token.
    An episode that was forked into several rows counts once, with the tokens of all its rows.

    Args:
        lengths: number of trained tokens of each row.
        reduction: name of the normalisation.
        episodes: the episode of each row; None means that each row is an episode.
        groups: the group of each row; `prompt_mean` needs it.
        max_tokens: the divisor of `constant`.
        total: sums a number over all ranks. All rows of an episode or group must be on the same rank.

    Raises:
        UsageError: The reduction is unknown, or an argument that it needs is missing.
    """
    rows = range(len(lengths))
    episodes = rows if episodes is None else episodes
    if reduction == "token_mean":
        # Processes add their sums before the division: a mean of their means would weight each process alike.
        count = total(float(sum(lengths)))
        return [1.0 / count if count else 0.0] * len(lengths)
    if reduction == "prompt_mean":
        if groups is None:
            raise UsageError("reduction 'prompt_mean' needs the group of each row")
        return _shares(lengths, groups, total)
    if reduction == "seq_mean":
        return _shares(lengths, episodes, total)
    if reduction == "constant":
        if not max_tokens or max_tokens < 1:
            raise UsageError(f"reduction 'constant' needs max_tokens of at least 1, not {max_tokens}")
        # An episode without a trained token has no part in the loss, and would shrink that of the others.
        alive = {episode for episode, length in zip(episodes, lengths, strict=True) if length}
        count = total(float(len(alive))) * max_tokens
        return [1.0 / count if count else 0.0] * len(lengths)
    raise UsageError(f"unknown reduction {reduction!r}")


def _shares(lengths: Sequence[int], keys: Sequence[Hashable], total: Callable[[float], float]) -> list[float]:
    """Return weights that give each key the same share, spread evenly over its tokens."""
    tokens: dict[Hashable, int] = defaultdict(int)
    for key, length in zip(keys, lengths, strict=True):
        tokens[key] += length
    count = total(float(sum(1 for held in tokens.values() if held)))
    return [1.0 / (count * tokens[key]) if tokens[key] else 0.0 for key in keys]


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
    # A gradient through the factor would be that of another objective than the corrected one.
    log_rho_N = (old_N - sampler_N).detach()
    if level == "sequence":
        log_rho_N = _sequence_sum(log_rho_N, sequence_N)
    rho_N = log_rho_N.clamp(-MAX_LOG_RHO, MAX_LOG_RHO).exp()
    # Truncating keeps a biased gradient of every token; a mask trusts none of those that have moved too far.
    if mode == "truncate":
        return rho_N.clamp(max=config.stream.importance_cap)
    inside_N = (rho_N >= 1 / config.stream.importance_cap) & (rho_N <= config.stream.importance_cap)
    return torch.where(inside_N, rho_N, torch.zeros_like(rho_N))


def off_policy_mask(
    logprobs_N: Tensor, sampler_N: Tensor, advantages_N: Tensor, sequence_N: Tensor, threshold: float | None
) -> Tensor:
    """Return 0 for sequences with a negative advantage that the policy has drifted away from, else 1.

    OPSM (slime, TRL's `off_policy_mask_threshold`): a sequence is left out if A < 0 and the mean of
    mu - lp over it is above the threshold.
    """
    if threshold is None:
        return torch.ones_like(sampler_N)
    drift_N = sequence_mean(sampler_N - logprobs_N.detach(), sequence_N)
    left_N = (advantages_N < 0) & (drift_N > threshold)
    return torch.where(left_N, torch.zeros_like(drift_N), torch.ones_like(drift_N))


def sequence_mean(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Return, at each token, the mean of the values over the token's sequence."""
    counts_N = _sequence_sum(torch.ones_like(values_N), sequence_N)
    return _sequence_sum(values_N, sequence_N) / counts_N


def _sequence_sum(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Return, at each token, the sum of the values over the token's sequence."""
    # Room for as many sequences as tokens, because counting them would wait for the device.
    return torch.zeros_like(values_N).index_add(0, sequence_N, values_N)[sequence_N]
