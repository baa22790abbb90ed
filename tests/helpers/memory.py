"""Count the bytes of tensors that operations of torch make, until they are freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Counted(TorchDispatchMode):
    """Counts storages from the operation that makes them on; those of the meta device have no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (list, tuple)) else [result]:
            with torch.no_grad():  # a DTensor claims the bytes of the whole tensor
                tensor = made.to_local() if isinstance(made, DTensor) else made
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # torch keeps one object for a storage as long as the storage lives
        if key not in self._sizes:
            self._sizes[key] = 0
            self.resized(key, storage.nbytes())
            weakref.finalize(storage, self._free, key)

    def resized(self, key: int, size: int) -> None:
        if key in self._sizes:
            self.held += size - self._sizes[key]
            self.peak = max(self.peak, self.held)
            self._sizes[key] = size

    def _free(self, key: int) -> None:
        self.held -= self._sizes.pop(key, 0)


def most_held(work: Callable[[], object]) -> int:
    """Return the most bytes of tensors that a function holds at once."""
    kind: Any = torch.UntypedStorage
    resize = kind.resize_
    counted = _Counted()

    def counting(storage: Any, size: int) -> Any:  # FSDP gathers and frees weights in this way
        resized = resize(storage, size)
        counted.resized(id(storage), size)
        return resized

    kind.resize_ = counting
    try:
        with counted:
            work()
    finally:
        kind.resize_ = resize
    return counted.peak
