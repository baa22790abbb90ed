"""Count the bytes that tensors hold at once, also of tensors without memory."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["MemoryTracker"]


class MemoryTracker(TorchDispatchMode):
    """Counts the storages that operations in its context make, until they are freed.

    It sees what PyTorch's allocator would see: on the CPU its peaks are those of the profiler, to the byte.
    Memory that a kernel needs while it runs is not counted.

    Args:
        existing: tensors that are there already and do not count.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.held = 0
        """Number of bytes that are held now."""
        self.peaks: dict[str, int] = {}
        """Most bytes held at once, by phase."""
        self.phase = ""
        # Invariant: the sizes of all counted storages that are alive; those of existing ones are 0.
        self._sizes: dict[int, int] = {_key(one.untyped_storage()): 0 for one in existing}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, DTensor):  # it claims the bytes of the whole tensor
                leaf = leaf._local_tensor  # noqa: PLW2901, SLF001 # pyright: ignore[reportPrivateUsage]
            # The values of a sparse gradient are a tensor of their own, which an earlier operation made.
            # On the meta device tensors have no memory, unlike the tensors of a mode that pretends it.
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        return result

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count in this context, also storages that are resized, as FSDP does with gathered weights."""
        kind: Any = torch.UntypedStorage
        resize = kind.resize_

        def counted(storage: Any, size: int) -> Any:
            resized = resize(storage, size)
            key = _key(storage)
            if key in self._sizes:
                self._add(size - self._sizes[key])
                self._sizes[key] = size
            return resized

        kind.resize_ = counted
        try:
            with self:
                yield
        finally:
            kind.resize_ = resize

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = _key(storage)
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


def _key(storage: torch.UntypedStorage) -> int:
    # Its address, which torch's own trackers use too.
    return storage._cdata  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
