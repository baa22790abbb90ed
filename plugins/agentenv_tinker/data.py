"""Rows as the Tinker API takes them, and its answers as numbers of rows.

The API shifts targets itself: a datum of n inputs has n targets, and the numbers at position i belong to the
token i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentenv.core import EngineError, UsageError
from agentenv.training.learners import Row

__all__ = ["datum_of", "logprobs_of", "make_datum"]


def make_datum(token_ids: Sequence[int], given: Mapping[str, np.ndarray], like: Any = None) -> Any:
    """Return a datum of a sequence, with numbers for each of its targets.

    Args:
        token_ids: the sequence.
        given: the numbers, by the names that the loss has for them.
        like: another datum of this sequence, whose tokens are taken instead of being converted once more.
    """
    from tinker import types

    if like is None:
        tokens = types.ModelInput.from_ints(list(token_ids[:-1]))
        targets = types.TensorData.from_numpy(np.asarray(token_ids[1:], dtype=np.int64))
    else:
        tokens, targets = like.model_input, like.loss_fn_inputs["target_tokens"]
    numbers = {
        name: types.TensorData.from_numpy(values.astype(np.float32, copy=False))
        for name, values in given.items()
    }
    return types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": targets, **numbers})


def datum_of(row: Row, given: Mapping[str, Tensor], like: Any = None) -> Any:
    """Return a row with numbers of its trained tokens; those of all others are 0."""
    if row.images:
        raise UsageError(
            "servers of the Tinker API are trained without images", remedy="train on this machine"
        )
    places = row.positions_n.numpy() - 1
    spread: dict[str, np.ndarray] = {}
    for name, values_n in given.items():
        spread[name] = np.zeros(len(row.token_ids) - 1, dtype=np.float32)
        spread[name][places] = values_n.detach().numpy()
    return make_datum(row.token_ids, spread, like)


def logprobs_of(name: str, output: Any, rows: Sequence[Row]) -> list[Tensor]:
    """Return the log-probabilities of the rows' trained tokens that a pass returned.

    Raises:
        EngineError: They are not one finite number for each token.
    """
    found: list[Tensor] = []
    for row, told in zip(rows, output.loss_fn_outputs, strict=True):
        values = np.asarray(told["logprobs"].to_numpy(), dtype=np.float64).ravel()
        chosen = values[row.positions_n.numpy() - 1] if len(values) == len(row.token_ids) - 1 else None
        if chosen is None or not np.isfinite(chosen).all():
            raise EngineError(
                f"{name} returned {len(values)} log-probabilities for {len(row.token_ids) - 1} tokens, or "
                "some that are not finite"
            )
        found.append(torch.from_numpy(chosen))
    return found
