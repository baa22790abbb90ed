"""Sample one token per row by inverting the distribution function at a uniform number.

The token of a row depends only on its own logits and its own number, so that a request with a seed
samples the same tokens whatever else is in its batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import torch

from agentenv.core.supports import MOST_TOKENS
from agentenv.engine.base import Sampling

__all__ = ["UNIFORM_STEPS", "cut_distribution", "draw"]

UNIFORM_STEPS = 2**23
"""Uniform numbers are whole multiples of 1/2**23, so that u * total < total in float32."""


def draw(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],
    masks: Mapping[int, torch.Tensor] | None = None,
) -> tuple[list[int], list[float], dict[int, array[int] | int]]:
    """Sample a token for each row and return ids, natural log-probabilities and supports.

    Log-probabilities refer to the distribution that is sampled: at the sampling temperature, after
    the mask, top-k, top-p and min-p. A row at temperature 0 gets the likeliest token and its logprob at
    T = 1. Rows that want their support are in the dictionary; of one that is too large it has only the size.

    Args:
        logits: [B, V], float32; overwritten.
        samplings: sampling settings of each row.
        uniforms: for each row a number in [0, 1) that is a multiple of 1/UNIFORM_STEPS.
        masks: [V], bool, which tokens a grammar allows, for rows that follow one.
    """
    for row, mask in (masks or {}).items():
        logits[row].masked_fill_(~mask.to(logits.device), float("-inf"))
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    if any(temperature != 1.0 for temperature in temperatures):
        logits.div_(torch.tensor(temperatures, device=logits.device)[:, None])
    supports: dict[int, array[int] | int] = {}
    for row, sampling in enumerate(samplings):
        if sampling.is_cut:
            cut_distribution(logits[row], sampling)
            if sampling.wants_support:
                supports[row] = _support(logits[row])
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
    return ids.tolist(), logprobs.tolist(), supports


def _support(logits: torch.Tensor) -> array[int] | int:
    """Return the ids that a cut has left, ascending; only their number if there are too many."""
    left = (logits > float("-inf")).nonzero()[:, 0]
    return len(left) if len(left) > MOST_TOKENS else array("i", left.tolist())


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
