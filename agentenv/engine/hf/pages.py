"""Tensors of zeros on the CPU that take memory only where they are written.

The keys and values of rows of very different lengths stand in one tensor, as wide as the longest row. The
kernel gives a page of such a tensor when it is first written, so that a short row takes what it has, and not
what the longest row beside it has. Reading a page that was never written takes no memory.
"""

from __future__ import annotations

import mmap
import sys
from math import prod

import torch

__all__ = ["Pages"]

SMALLEST = 1 << 20
"""Bytes below which a tensor is plain memory, of which there is little to save."""


class Pages:
    """The memory of one tensor of zeros.

    Args:
        like: a tensor of the number format and the device.
        shape: `[rows, heads, columns, numbers]`.
    """

    def __init__(self, like: torch.Tensor, shape: tuple[int, int, int, int]) -> None:
        count = prod(shape)
        self._map: mmap.mmap | None = None
        # Elsewhere than on Linux, pages that are given back need not read as zeros.
        if like.device.type != "cpu" or count * like.itemsize < SMALLEST or sys.platform != "linux":
            self.tensor = like.new_zeros(shape)
            return
        self._map = mmap.mmap(-1, count * like.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would hold columns of several rows
        self.tensor = torch.frombuffer(self._map, dtype=like.dtype, count=count).view(shape)

    def give_back(self, row: int, first: int, end: int) -> None:
        """Set a row's columns from `first` to before `end` to zero, and give their whole pages back."""
        if self._map is None:
            self.tensor[row, :, first:end] = 0
            return
        _, heads, columns, numbers = self.tensor.shape
        column_bytes = numbers * self.tensor.itemsize
        for head in range(heads):
            start = (row * heads + head) * columns * column_bytes
            begin = -(-(start + first * column_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            past = (start + end * column_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if begin >= past:
                self.tensor[row, head, first:end] = 0
                continue
            # The pages at both ends hold other columns too.
            self.tensor[row, head, first : -(-(begin - start) // column_bytes)] = 0
            self.tensor[row, head, (past - start) // column_bytes : end] = 0
            self._map.madvise(mmap.MADV_DONTNEED, begin, past - begin)
