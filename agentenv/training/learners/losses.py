"""The loss of whole rows from the log-probabilities of their trained tokens, the same for every learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from agentenv.training.config import GRPOConfig
from agentenv.training.metrics import Meter
from agentenv.training.objective.loss import LossInputs, grpo_loss
from agentenv.training.rows import Row, to_device

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
    entropy_N: Tensor | None = None,
    loss_fn: Callable[[LossInputs], Tensor] | None = None,
) -> tuple[Tensor, Told]:
    """Return the loss of rows, each token with its row's weight, and what records its metrics.

    Episodes have the policy loss, and demonstrations the cross entropy. Nothing is read from the device of
    the scores, so that the host prepares the next pass while the device works.

    Args:
        rows: whole rows.
        logprobs_N: log-probabilities of their trained tokens in order, with gradient.
        config: the run's options.
        entropy_N: entropy of the policy at each token, if it is known.
        loss_fn: the user's surrogate loss, if any.
    """
    played = [row for row in rows if not row.demonstration]
    shown = [row for row in rows if row.demonstration]
    played_logprobs_n = _of(rows, logprobs_N, demonstration=False)
    shown_logprobs_n = _of(rows, logprobs_N, demonstration=True)
    output = grpo_loss(
        played_logprobs_n,
        **_given(played, played_logprobs_n, recompute=config.proximal == "recompute"),
        config=config,
        entropy=None if entropy_N is None else _of(rows, entropy_N, demonstration=False),
        sequence_ids=torch.tensor([n for n, row in enumerate(played) for _ in range(row.num_trained)]),
        loss_fn=loss_fn,
    )

    def tell(meter: Meter, *, moved: bool) -> None:
        meter.add(_told(output.sums, moved), output.num_tokens)
        meter.add_extremes(_told(output.extremes, moved))
        meter.add({"sft/nll": -shown_logprobs_n.detach().sum()}, shown_logprobs_n.numel())

    return output.loss - (_weights(shown, shown_logprobs_n) * shown_logprobs_n).sum(), tell


def _told(found: dict[str, torch.Tensor], moved: bool) -> dict[str, torch.Tensor]:
    return {name: value for name, value in found.items() if not (moved and name.startswith("mismatch/"))}


def _of(rows: Sequence[Row], values_N: Tensor, *, demonstration: bool) -> Tensor:
    """Return the values at the trained tokens of the demonstrations, or of the other rows."""
    parts = zip(rows, values_N.split([row.num_trained for row in rows]), strict=True)
    return torch.cat([values_N[:0], *(part for row, part in parts if row.demonstration is demonstration)])


def _given(rows: Sequence[Row], logprobs_n: Tensor, *, recompute: bool) -> dict[str, Tensor]:
    """Return the loss function's inputs for each token, in the format and on the device of the scores."""
    turns, attempts = ([row.indices()[kind] for row in rows] for kind in (0, 1))
    given = {
        "advantages": _joined([row.advantages_n for row in rows], logprobs_n),
        "sampler_logprobs": _joined([row.sampler_n for row in rows], logprobs_n),
        "weights": _weights(rows, logprobs_n),
        "turns": _joined(turns, logprobs_n, torch.long),
        "attempts": _joined(attempts, logprobs_n, torch.long),
    }
    if recompute and any(row.old_n is None for row in rows):
        # The batch has one update only, so the proximal policy is the policy itself.
        given["old_logprobs"] = logprobs_n.detach()
    else:
        old = [row.sampler_n if row.old_n is None else row.old_n for row in rows]
        given["old_logprobs"] = _joined(old, logprobs_n)
    ref = [row.ref_n for row in rows if row.ref_n is not None]
    return given | {"ref_logprobs": _joined(ref, logprobs_n)} if len(ref) == len(rows) else given


def _weights(rows: Sequence[Row], like: Tensor) -> Tensor:
    """Return each row's weight at each of its trained tokens."""
    return _joined([torch.full(row.positions_n.shape, row.weight, dtype=like.dtype) for row in rows], like)


def _joined(parts: Sequence[Tensor], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return values of rows as one tensor, on the device of another and in its format if none is named."""
    dtype = dtype or like.dtype
    joined = torch.cat([torch.empty(0, dtype=dtype), *(part.to(dtype) for part in parts)])
    return to_device(joined, like.device)
