"""Count the bytes that tensors hold at once, also of tensors without memory."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentenv.core.torch_internals import watched_operations

__all__ = ["MemoryTracker"]


class MemoryTracker:
    """Counts the storages that operations make while it counts, until they are freed.

    It sees what PyTorch's allocator would see: on the CPU its peaks are those of the profiler, to the byte.
    Memory that a kernel needs while it runs is not counted.

    Args:
        existing: tensors that are there already and do not count.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        self.held = 0
        """Number of bytes that are held now."""
        self.peaks: dict[str, int] = {}
        """Most bytes held at once, by phase."""
        self.phase = ""
        # Invariant: the sizes of all counted storages that are alive; those of existing ones are 0.
        self._sizes: dict[int, int] = {id(one.untyped_storage()): 0 for one in existing}

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count in this context, also storages that are resized, as FSDP does with gathered weights."""
        kind: Any = torch.UntypedStorage
        resize = kind.resize_

        def counted(storage: Any, size: int) -> Any:
            resized = resize(storage, size)
            key = id(storage)
            if key in self._sizes:
                self._add(size - self._sizes[key])
                self._sizes[key] = size
            return resized

        kind.resize_ = counted
        try:
            with watched_operations(self._see):
                yield
        finally:
            kind.resize_ = resize

    def _see(self, result: Any) -> None:
        """Count the storages of the tensors that an operation returned."""
        if isinstance(result, list | tuple):
            for part in cast("Sequence[Any]", result):
                self._see(part)
        if not isinstance(result, Tensor):
            return
        if isinstance(result, DTensor):  # it claims the bytes of the whole tensor
            with torch.no_grad():
                result = result.to_local()
        # The values of a sparse gradient are a tensor of their own, which an earlier operation made.
        # On the meta device tensors have no memory, unlike the tensors of a mode that pretends it.
        if result.layout == torch.strided and result.device.type != "meta":
            self._count(result.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        # torch keeps one object for a storage as long as the storage lives.
        key = id(storage)
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._add(self._sizes[key])
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.held -= self._sizes.pop(key, 0)

    def _add(self, size: int) -> None:
        self.held += size
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.held)
