"""Weights in safetensors files, of which each process reads only its own part of every tensor."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["Merged", "WeightFiles"]

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
MOST_HEADER = 100_000_000
"""Largest header in bytes, as in the safetensors package."""


KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Number formats by their names in the header of a file."""


class Entry(NamedTuple):
    """Where a tensor lies in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Byte of the file at which the tensor begins."""


class Merged(NamedTuple):
    """A weight that the files hold in pieces, such as those of the experts of a layer.

    Pieces are stacked along a new first dimension, and stacks are then joined.
    """

    stacks: tuple[tuple[str, ...], ...]
    """For each stack, the names of its pieces in the files."""
    dim: int
    """Dimension of the stacks along which they are joined; not the first one."""


class WeightFiles:
    """The safetensors files of a Hugging Face directory.

    The safetensors package maps a whole file into memory, and its pages count for each process that reads
    them. Here the bytes that are asked for are read, and no others.

    Args:
        entries: where each tensor lies, by its name.
        merged: weights that are made of several of these tensors, by their names.
    """

    def __init__(
        self, entries: Mapping[str, Entry], merged: Mapping[str, Merged] = MappingProxyType({})
    ) -> None:
        self.entries, self.merged = dict(entries), dict(merged)

    @classmethod
    def of(cls, directory: Path) -> WeightFiles | None:
        """Return the weights of a directory; None if they are not in safetensors files.

        Raises:
            OSError: A file is missing, or it is no safetensors file.
        """
        index, whole = directory / INDEX, directory / WHOLE
        if index.is_file():
            names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(names.values()))
        elif whole.is_file():
            files = [WHOLE]
        else:
            return None
        entries: dict[str, Entry] = {}
        for file in files:
            entries |= _entries(directory / file)
        return cls(entries)

    @property
    def names(self) -> list[str]:
        """The names of all weights, without pieces of merged ones."""
        pieces = {name for one in self.merged.values() for stack in one.stacks for name in stack}
        return [*(name for name in self.entries if name not in pieces), *self.merged]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        if name not in self.merged:
            return self.entries[name].shape
        stacks, dim = self.merged[name]
        shapes = [(len(stack), *self.entries[stack[0]].shape) for stack in stacks]
        joined = list(shapes[0])
        joined[dim] = sum(shape[dim] for shape in shapes) if len(shapes) > 1 else joined[dim]
        return tuple(joined)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Return a tensor, or some of its rows."""
        if name in self.merged:
            return self._merge(name, slice(0, self.shape(name)[0]) if rows is None else rows)
        path, dtype, shape, start = self.entries[name]
        if rows is not None:
            start += rows.start * math.prod(shape[1:]) * dtype.itemsize
            shape = (rows.stop - rows.start, *shape[1:])
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            with path.open("rb") as file:
                file.seek(start)
                numbers: Any = tensor.reshape(-1).view(torch.uint8).numpy()
                read = file.readinto(numbers)
            if read != tensor.numel() * dtype.itemsize:
                raise OSError(f"{path} is cut off: it ends within {name!r}")
        return tensor

    def _merge(self, name: str, rows: slice) -> Tensor:
        """Return some rows of a merged weight, whose pieces are read one after the other."""
        stacks, dim = self.merged[name]
        shape = (rows.stop - rows.start, *self.shape(name)[1:])
        merged = torch.empty(shape, dtype=self.entries[stacks[0][0]].dtype)
        first = 0
        for stack in stacks:
            size = self.entries[stack[0]].shape[dim - 1]
            for place, piece in zip(merged, stack[rows], strict=True):
                place.narrow(dim - 1, first, size).copy_(self.read(piece))
            first += size
        return merged

    def part(self, name: str, spread: Tensor) -> Tensor:
        """Return the part of a tensor that this process holds of one that is sharded like `spread`."""
        return self.read(name, own_rows(spread))


def _entries(path: Path) -> dict[str, Entry]:
    """Return where the tensors of a file lie, which its header says."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        try:
            header: dict[str, Any] = json.loads(file.read(min(size, MOST_HEADER)))
        except ValueError:
            raise OSError(f"{path} is no safetensors file") from None
    first = 8 + size
    return {
        name: Entry(path, _kind(path, one["dtype"]), tuple(one["shape"]), first + one["data_offsets"][0])
        for name, one in header.items()
        if name != "__metadata__"
    }


def _kind(path: Path, name: str) -> torch.dtype:
    if name not in KINDS:
        raise OSError(f"{path} holds numbers of the format {name}, which cannot be read in parts")
    return KINDS[name]


def own_rows(spread: Tensor) -> slice | None:
    """Return the rows of a sharded tensor that this process holds; None if it holds the whole tensor."""
    if not isinstance(spread, DTensor):
        return None
    sharding = [index for index, placement in enumerate(spread.placements) if placement.is_shard(0)]
    if not sharding:
        return None
    (dim,) = sharding
    rows = spread.shape[0]
    each = -(-rows // spread.device_mesh.size(dim))
    first = min(rows, spread.device_mesh.get_local_rank(dim) * each)
    return slice(first, min(rows, first + each))
