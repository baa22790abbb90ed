"""Look at a directory of weights before vLLM reads it: a read that fails half-way leaves vLLM broken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentenv.core.errors import EngineError

__all__ = ["context_limit", "require_weights"]

SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def require_weights(path: str | Path, served: str | Path | None, *, remote: bool = False) -> None:
    """Refuse a directory that holds no weights, or those of a model of another shape.

    Args:
        path: what is to be read.
        served: where the present weights came from, as far as it is known and lies on this machine.
        remote: the reader sees other files, so that a path which is not here may be there.

    Raises:
        EngineError: The directory cannot be read; nothing was changed.
    """
    place = Path(path)
    if remote and not place.exists():
        return
    if not any(place.glob("*.safetensors")):
        raise EngineError(f"cannot load weights from {path}: there is no *.safetensors; nothing was changed")
    new, old = _config(place), {} if served is None else _config(Path(served))
    for name in SHAPE:
        if name in new and name in old and new[name] != old[name]:
            raise EngineError(
                f"cannot load weights from {path}: they are of another model, with {name} {new[name]} "
                f"instead of {old[name]}; nothing was changed"
            )


def context_limit(path: str | Path) -> int | None:
    """Return how many tokens a model directory says that the model takes; None if it does not say."""
    config = _config(Path(path))
    text = config.get("text_config")
    limit = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def _config(place: Path) -> Mapping[str, Any]:
    try:
        found: Any = json.loads((place / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
