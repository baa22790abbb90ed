"""The context limit that the configuration of a model describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["context_length"]


def context_length(positions: object, scaling: object) -> int | None:
    """Return the number of tokens that a model accepts, or None if its configuration names no limit.

    The limit is the one that vLLM derives: YaRN extends the length that the model was first trained on, and
    dynamic NTK the configured one. LongRoPE and Llama 3 configurations name the extended length themselves.
    So do some with linear scaling, which others leave to the reader; the length that they name is kept.

    Args:
        positions: `max_position_embeddings` of the configuration.
        scaling: `rope_parameters` (or `rope_scaling`) of the configuration, which may have one entry for
            each kind of layer.
    """
    if not isinstance(positions, int):
        return None
    if not isinstance(scaling, Mapping):
        return positions
    kinds = [kind for kind in scaling.values() if isinstance(kind, Mapping)] or [scaling]
    return max(positions, *(_extended(positions, kind) for kind in kinds))


def _extended(positions: int, scaling: Mapping[str, Any]) -> int:
    factor = scaling.get("factor")
    if not isinstance(factor, (int, float)):
        return positions
    name = scaling.get("rope_type", scaling.get("type"))
    if name == "yarn":
        return int((scaling.get("original_max_position_embeddings") or positions) * factor)
    return int(positions * factor) if name == "dynamic" else positions
