"""Check a directory of weights before vLLM reads it, because a read that fails half-way breaks vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentenv.core.errors import EngineError

__all__ = ["require_weights", "vocab_size"]

# Entries of `config.json` that must agree for weights to fit a running model.
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
    """Refuse a directory that has no weights, or the weights of a model of another shape.

    Args:
        path: directory of the new weights.
        served: directory of the present weights, if it is known and on this machine.
        remote: whether vLLM runs on another machine, where a path that is missing here may exist.

    Raises:
        EngineError: The weights cannot be loaded; nothing was changed.
    """
    directory = Path(path)
    if remote and not directory.exists():
        return
    if not any(directory.glob("*.safetensors")):
        raise EngineError(
            f"cannot load weights from {path}: it has no *.safetensors file; nothing was changed"
        )
    # Compared by shape and not by name: a trained model is saved elsewhere, and fits all the same.
    new, old = _config(directory), {} if served is None else _config(Path(served))
    for name in SHAPE:
        if name in new and name in old and new[name] != old[name]:
            raise EngineError(
                f"cannot load weights from {path}: they belong to another model, whose {name} is {new[name]} "
                f"and not {old[name]}; nothing was changed"
            )


def vocab_size(path: str | Path) -> int | None:
    """Return the vocabulary size in the configuration of a model directory, or None if it has none."""
    size = _text_config(path).get("vocab_size")
    return size if isinstance(size, int) else None


def _text_config(path: str | Path) -> Mapping[str, Any]:
    config = _config(Path(path))
    # Models with images nest the configuration of the part that reads text.
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _config(directory: Path) -> Mapping[str, Any]:
    try:
        config: Any = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
