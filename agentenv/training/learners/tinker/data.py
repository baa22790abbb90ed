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

from agentenv.core.errors import EngineError, UsageError
from agentenv.training.rows import Row

__all__ = ["datum_of", "logprobs_of", "make_datum"]


def make_datum(token_ids: Sequence[int], given: Mapping[str, np.ndarray]) -> Any:
    """Return a datum of a sequence, with numbers for each of its targets."""
    from tinker import types

    targets = np.asarray(token_ids[1:], dtype=np.int64)
    inputs = {"target_tokens": types.TensorData.from_numpy(targets)}
    inputs |= {name: types.TensorData.from_numpy(values.astype(np.float32)) for name, values in given.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(list(token_ids[:-1])), loss_fn_inputs=inputs)


def datum_of(row: Row, given: Mapping[str, Tensor]) -> Any:
    """Return a row with numbers of its trained tokens; those of all others are 0."""
    if row.images:
        raise UsageError(
            "servers of the Tinker API are trained without images", remedy="train on this machine"
        )
    places = row.positions_n.numpy() - 1
    spread: dict[str, np.ndarray] = {}
    for name, values_n in given.items():
        spread[name] = np.zeros(len(row.token_ids) - 1)
        spread[name][places] = values_n.detach().double().numpy()
    return make_datum(row.token_ids, spread)


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
