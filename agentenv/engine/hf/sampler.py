"""Sample one token per row by inverting the distribution function at a uniform number.

The token of a row depends only on its own logits and its own number, so that a request with a seed
samples the same tokens whatever else is in its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentenv.engine.base import Sampling

__all__ = ["UNIFORM_STEPS", "draw"]

UNIFORM_STEPS = 2**23
"""Uniform numbers are whole multiples of 1/2**23, so that u * total < total in float32."""


def draw(
    logits: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample a token for each row and return ids and natural log-probabilities.

    Log-probabilities refer to the distribution that is sampled: at the sampling temperature, after
    top-k, top-p and min-p. A row at temperature 0 gets the likeliest token and its logprob at T = 1.

    Args:
        logits: [B, V], float32; overwritten.
        samplings: sampling settings of each row.
        uniforms: for each row a number in [0, 1) that is a multiple of 1/UNIFORM_STEPS.
    """
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    if any(temperature != 1.0 for temperature in temperatures):
        logits.div_(torch.tensor(temperatures, device=logits.device)[:, None])
    for row, sampling in enumerate(samplings):
        if sampling.temperature and (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
            cut_distribution(logits[row], sampling)
    highest, best = logits.max(dim=-1)
    weights = logits.sub_(highest[:, None]).exp_()
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    targets = torch.tensor(uniforms, device=logits.device) * total
    ids = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
    greedy = torch.tensor([sampling.temperature == 0 for sampling in samplings], device=logits.device)
    ids = torch.where(greedy, best, ids.clamp_(max=logits.shape[-1] - 1))
    chosen = weights.gather(1, ids[:, None])[:, 0]
    logprobs = chosen.log() - total.log()
    return ids.tolist(), logprobs.tolist()


def cut_distribution(logits: torch.Tensor, sampling: Sampling) -> None:
    """Set the logits that top-k, min-p and top-p (in this order) exclude to minus infinity.

    The likeliest token is never excluded. Of equal logits at the edge of top-p, the first are kept.

    Args:
        logits: [V], at the sampling temperature; changed in place.
        sampling: settings with the limits.
    """
    lowest = float("-inf")
    if 0 < sampling.top_k < logits.shape[-1]:
        edge = logits.topk(sampling.top_k).values[-1]
        logits.masked_fill_(logits < edge, lowest)
    if sampling.min_p > 0:
        probabilities = logits.softmax(-1)
        logits.masked_fill_(probabilities < sampling.min_p * probabilities.max(), lowest)
    if sampling.top_p < 1:
        ordered, order = logits.softmax(-1).sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        logits[order[before >= sampling.top_p]] = lowest
