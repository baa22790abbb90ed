"""Weights in safetensors files, of which each process reads only its own part of every tensor."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentenv.core.errors import DependencyMissing

__all__ = ["read_into", "storage", "stored"]

INDEX = "model.safetensors.index.json"


def storage(kind: str) -> Any:
    """Return the class by which `torch.distributed.checkpoint` reads or writes safetensors files.

    Args:
        kind: `Reader` or `Writer`.

    Raises:
        DependencyMissing: This version of torch has none.
    """
    from torch.distributed import checkpoint

    found = getattr(checkpoint, f"HuggingFaceStorage{kind}", None)
    if found is None:
        raise DependencyMissing(
            f"torch {torch.__version__} has no checkpoints of sharded state as safetensors files",
            remedy="install a newer torch; 2.13 was tried",
        )
    return found


def stored(directory: Path) -> Mapping[str, Any]:
    """Return the shape (`size`) and format of each tensor in the safetensors files of a directory.

    An index, if there is one, says which of them count: a directory may hold the same weights twice.
    """
    found: Mapping[str, Any] = storage("Reader")(str(directory)).read_metadata().state_dict_metadata
    if not (directory / INDEX).is_file():
        return found
    names = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return {name: found[name] for name in names}


def read_into(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite tensors with those of the same names in a directory; of sharded ones, the parts held here."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # nobody else is needed
        load(dict(tensors), storage_reader=storage("Reader")(str(directory)), no_dist=True)
