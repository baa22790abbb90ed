"""Sharded state in files: each process writes its own parts, and any number of processes reads them again.

`torch.distributed.checkpoint` writes and reads the parts, as safetensors files, which hold numbers only and
no code. A tree of state is cut in two: its sharded tensors, and the rest, where names stand for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentenv.core.errors import StoreError
from agentenv.training.learners.torch.files import read_into, storage, stored
from agentenv.training.learners.torch.world import World

__all__ = ["fill_in", "index_of", "read_parts", "take_out", "write_parts"]

MARK = "sharded tensor "
"""Beginning of the text that stands for a sharded tensor, before the tensor's name."""


def take_out(tree: Any, name: str = "") -> tuple[Any, dict[str, DTensor]]:
    """Return nested dicts and lists with names for the sharded tensors, and these tensors by name."""
    if isinstance(tree, DTensor):
        return MARK + name, {name: tree}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        return tree, {}
    rest: dict[Any, Any] = {}
    taken: dict[str, DTensor] = {}
    for key, value in items:
        rest[key], found = take_out(value, f"{name}.{key}" if name else str(key))
        taken |= found
    return rest if isinstance(tree, Mapping) else list(rest.values()), taken


def fill_in(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return nested dicts and lists with the tensors in the places of their names."""
    if isinstance(tree, str) and tree.startswith(MARK):
        return tensors[tree.removeprefix(MARK)]
    if isinstance(tree, Mapping):
        return {key: fill_in(value, tensors) for key, value in tree.items()}
    return [fill_in(value, tensors) for value in tree] if isinstance(tree, list) else tree


def write_parts(directory: Path, tensors: Mapping[str, DTensor], world: World) -> None:
    """Write this process's parts into a directory. All processes must call this together.

    Raises:
        StoreError: A process could not write, or not where the first process reads.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = storage("Writer")(str(directory), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer, process_group=world.values)
    except CheckpointException as error:
        failed = "; ".join(f"process {rank}: {one[0]}" for rank, one in sorted(error.failures.items()))
        raise StoreError(f"cannot write the optimiser's state to {directory}: {failed}") from error
    if world.rank:
        return
    found = stored(directory)
    for name, tensor in tensors.items():
        chunks = found[name].chunks if name in found else ()
        if sum(chunk.sizes.numel() for chunk in chunks) != tensor.numel():
            raise StoreError(
                f"{directory} does not hold what the other processes wrote",
                remedy="put output_dir on a disk that all machines share",
            )


def read_parts(directory: Path, like: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a directory, of sharded ones this process's parts.

    Args:
        directory: the directory, which any number of processes may have written.
        like: returns, for a tensor's name, one of its shape that is sharded as it shall be.

    Raises:
        StoreError: A file cannot be read.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    tensors: dict[str, Tensor] = {}
    for name, found in stored(directory).items():
        model, dtype = like(name), found.properties.dtype
        shaped = model.shape == found.size
        tensors[name] = (
            torch.empty_like(model, dtype=dtype) if shaped else torch.empty(found.size, dtype=dtype)
        )
    try:
        read_into(directory, tensors)
    except CheckpointException as error:
        raise StoreError(f"cannot read the optimiser's state in {directory}: {error}") from error
    return tensors


def index_of(name: str) -> int:
    """Return the number of the parameter that a tensor of the optimiser's state belongs to."""
    numbered = re.match(r"(?:masters|inner\.state)\.(\d+)", name)
    if numbered is None:
        raise StoreError(f"the optimiser's state has a tensor {name!r}, which belongs to no parameter")
    return int(numbered[1])
