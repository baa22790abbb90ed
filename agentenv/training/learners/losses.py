"""The loss of whole rows from the log-probabilities of their trained tokens, the same for every learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from agentenv.training.config import GRPOConfig
from agentenv.training.metrics import Meter
from agentenv.training.objective.loss import LossInputs, grpo_loss
from agentenv.training.rows import Row

__all__ = ["rows_loss"]


class Told(Protocol):
    """Records the metrics of a loss."""

    def __call__(self, meter: Meter, *, moved: bool) -> None:
        """Add them to a meter; without the mismatch if an earlier update has changed the weights."""
        ...


def rows_loss(
    rows: Sequence[Row],
    logprobs_N: Tensor,
    config: GRPOConfig,
    *,
    sequence_N: Tensor,
    entropy_N: Tensor | None = None,
    loss_fn: Callable[[LossInputs], Tensor] | None = None,
) -> tuple[Tensor, Told]:
    """Return the loss of rows, each token with its row's weight, and what records its metrics.

    Episodes have the policy loss, and demonstrations the cross entropy.

    Args:
        rows: whole rows.
        logprobs_N: log-probabilities of their trained tokens in order, with gradient.
        config: the run's options.
        sequence_N: index of each token's row.
        entropy_N: entropy of the policy at each token, if it is known.
        loss_fn: the user's surrogate loss, if any.
    """
    given = _given(rows, logprobs_N, recompute=config.proximal == "recompute")
    shown_N = _spread(rows, lambda row: float(row.demonstration), logprobs_N).bool()
    turns, attempts = zip(*(row.indices() for row in rows), strict=True)
    output = grpo_loss(
        logprobs_N,
        **given,
        config=config,
        loss_mask=~shown_N,
        entropy=entropy_N,
        sequence_ids=sequence_N,
        turns=torch.cat(turns).to(logprobs_N.device),
        attempts=torch.cat(attempts).to(logprobs_N.device),
        loss_fn=loss_fn,
    )

    shown_logprobs_n = logprobs_N[shown_N]

    def tell(meter: Meter, *, moved: bool) -> None:
        meter.add(_told(output.sums, moved), output.num_tokens)
        meter.add_extremes(_told(output.extremes, moved))
        meter.add({"sft/nll": -shown_logprobs_n.detach().sum()}, shown_logprobs_n.numel())

    return output.loss - (given["weights"][shown_N] * shown_logprobs_n).sum(), tell


def _told(found: dict[str, torch.Tensor], moved: bool) -> dict[str, torch.Tensor]:
    return {name: value for name, value in found.items() if not (moved and name.startswith("mismatch/"))}


def _given(rows: Sequence[Row], logprobs_N: torch.Tensor, *, recompute: bool) -> dict[str, torch.Tensor]:
    """Return the loss function's inputs for each token, in the format and on the device of the scores."""

    def gather(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(values)).to(logprobs_N)

    given = {
        "advantages": gather([row.advantages_n for row in rows]),
        "sampler_logprobs": gather([row.sampler_n for row in rows]),
        "weights": _spread(rows, lambda row: row.weight, logprobs_N),
    }
    if recompute and any(row.old_n is None for row in rows):
        # The batch has one update only, so the proximal policy is the policy itself.
        given["old_logprobs"] = logprobs_N.detach()
    else:
        given["old_logprobs"] = gather([row.sampler_n if row.old_n is None else row.old_n for row in rows])
    ref = [row.ref_n for row in rows if row.ref_n is not None]
    return given | {"ref_logprobs": gather(ref)} if len(ref) == len(rows) else given


def _spread(rows: Sequence[Row], value: Callable[[Row], float], like: torch.Tensor) -> torch.Tensor:
    """Return each row's number at each of its trained tokens."""
    parts = [torch.full(row.positions_n.shape, value(row), dtype=torch.float64) for row in rows]
    return torch.cat(parts).to(like)
