"""Sample one token per row by inverting the distribution function at a uniform number.

The token of a row depends only on its own logits and its own number, so that a request with a seed
samples the same tokens whatever else is in its batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from agentenv.core.supports import MOST_TOKENS
from agentenv.engine.interface import Sampling

__all__ = ["UNIFORM_STEPS", "cut_distribution", "draw"]

UNIFORM_STEPS = 2**23
"""Uniform numbers are whole multiples of 1/2**23, so that u * total < total in float32."""
CANDIDATES = (128, 2048)
"""How many of the likeliest tokens a cut looks at, before it sorts the whole vocabulary."""


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
    cut = {row: sampling for row, sampling in enumerate(samplings) if sampling.is_cut}
    plain = [row for row in range(len(samplings)) if row not in cut]
    drawn: dict[int, tuple[int, float]] = {}
    supports: dict[int, array[int] | int] = {}
    if plain:
        values = logits[plain] if cut else logits
        greedy = [samplings[row].temperature == 0 for row in plain]
        columns, logprobs = _invert(values, [uniforms[row] for row in plain], greedy)
        drawn |= zip(plain, zip(columns.tolist(), logprobs.tolist(), strict=True), strict=True)
    for left in _cuts(logits, cut):
        columns, logprobs = _invert(left.values.clone(), [uniforms[row] for row in left.rows])
        ids = left.ids.gather(1, columns[:, None])[:, 0]
        drawn |= zip(left.rows, zip(ids.tolist(), logprobs.tolist(), strict=True), strict=True)
        for row, own, values in zip(left.rows, left.ids, left.values, strict=True):
            if samplings[row].wants_support:
                supports[row] = _support(own[values > float("-inf")])
    ids, logprobs = zip(*(drawn[row] for row in range(len(samplings))), strict=True)
    return list(ids), list(logprobs), supports


def _invert(
    values: torch.Tensor, uniforms: Sequence[float], greedy: Sequence[bool] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column that each row draws, or its greatest for a greedy row, and the log-probability, [B].

    Args:
        values: [B, W], logits; overwritten.
        uniforms: as in `draw`.
        greedy: which rows take their greatest value; none if it is empty.
    """
    weights = values.sub_(values.amax(dim=-1, keepdim=True)).exp_()
    if greedy and all(greedy):
        columns, total = weights.argmax(dim=-1), weights.sum(dim=-1)
    else:
        cumulative = weights.cumsum(dim=-1)
        total = cumulative[:, -1]
        targets = torch.tensor(uniforms, device=values.device) * total
        columns = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
        columns.clamp_(max=values.shape[-1] - 1)
        if values.is_cuda:
            columns = _possible(columns, weights)
        if any(greedy):
            columns = torch.where(torch.tensor(greedy, device=values.device), weights.argmax(dim=-1), columns)
    return columns, weights.gather(1, columns[:, None])[:, 0].log() - total.log()


def _possible(columns: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return columns of which none has the weight 0: the greatest of the row in the place of one that has.

    Sums of a row on CUDA are made in parts, so that they may fall by a rounding error from one token to the
    next. A search in them may then end at a token that cannot be sampled.
    """
    of_weight = weights.gather(1, columns[:, None])[:, 0]
    return torch.where(of_weight == 0, weights.argmax(dim=-1), columns)


def _support(kept: torch.Tensor) -> array[int] | int:
    """Return the ids that a cut has left, ascending; only their number if there are too many."""
    return len(kept) if len(kept) > MOST_TOKENS else array("i", kept.tolist())


def cut_distribution(logits: torch.Tensor, sampling: Sampling) -> None:
    """Set the logits that top-k, min-p and top-p (in this order) exclude to minus infinity.

    Args:
        logits: [B, V], at the sampling temperature; changed in place.
        sampling: settings with the limits.
    """
    for left in _cuts(logits, dict.fromkeys(range(len(logits)), sampling)):
        rows = torch.tensor(left.rows, device=logits.device)[:, None]
        logits[rows[:, 0]] = float("-inf")
        logits[rows, left.ids] = left.values


class _Left(NamedTuple):
    """What top-k, min-p and top-p have left of some rows."""

    rows: list[int]
    ids: torch.Tensor
    """[B, W], ascending; all that is left is among them."""
    values: torch.Tensor
    """[B, W], the logits of these ids; minus infinity for those that are excluded."""


def _cuts(logits: torch.Tensor, samplings: Mapping[int, Sampling]) -> Iterator[_Left]:
    """Cut the rows that have settings; each of them is in one of the results.

    The likeliest token is never excluded. Top-k keeps all logits that equal the last one that it keeps; of
    equal logits at the edge of top-p, the first are kept.
    """
    rows = list(samplings)
    # Sorting a whole vocabulary takes thirty times as long as finding the tokens that matter, which are few
    # nearly always. A row whose edge lies beyond the candidates is looked at again with more of them.
    for width in (*(count for count in CANDIDATES if count < logits.shape[-1]), logits.shape[-1]):
        if rows:
            part = logits if len(rows) == len(logits) else logits[rows]
            ids, values, known = _cut_among(part, [samplings[row] for row in rows], width)
            if any(known):
                yield _Left([row for row, whole in zip(rows, known, strict=True) if whole], ids, values)
            rows = [row for row, whole in zip(rows, known, strict=True) if not whole]


def _cut_among(
    logits: torch.Tensor, samplings: Sequence[Sampling], width: int
) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """Cut rows by their `width` likeliest tokens; also say for which rows these were enough.

    Returns:
        Ids and values as in `_Left`, only of the rows for which the candidates were enough.
    """
    vocabulary = logits.shape[-1]
    # Candidates stand by descending logit, equal ones by ascending id.
    ids = torch.arange(vocabulary, device=logits.device).expand_as(logits)
    if width < vocabulary:
        ids = logits.topk(width).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)

    def column(name: str) -> torch.Tensor:
        settings = [getattr(sampling, name) for sampling in samplings]
        return torch.tensor(settings, device=logits.device)[:, None]

    top_k, min_p, top_p = column("top_k"), column("min_p"), column("top_p")
    by_number = (top_k > 0) & (top_k < vocabulary)
    last = values.gather(1, (top_k - 1).clamp(0, width - 1))
    keep = (values > float("-inf")) & ((values >= last) | ~by_number)
    keep &= (values - values[:, :1]).exp() >= min_p
    # Top-p is a share of what top-k and min-p have left, which must then be among the candidates.
    narrowed = (by_number | (min_p > 0))[:, 0]
    edge = _edges(values, keep)
    total = values.masked_fill(~keep, float("-inf")).logsumexp(dim=-1)
    if not narrowed.all():
        total = torch.where(narrowed, total, logits.logsumexp(dim=-1))
    before = (values - total[:, None]).exp().cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = 0
    keep &= (before < top_p) | (top_p >= 1)
    edge = torch.where(narrowed, edge, _edges(values, keep))
    # A token beyond the candidates may equal the last of them, and would be kept if that one is.
    known = (edge > values[:, -1]) | (width == vocabulary)
    inside = torch.empty_like(values).scatter_(1, order, values.masked_fill(~keep, float("-inf")))
    return ids[known], inside[known], known.tolist()


def _edges(values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return the last value of each row that is kept, [B]; the first where none is."""
    return values.gather(1, (keep.sum(dim=-1, keepdim=True) - 1).clamp_(min=0))[:, 0]
