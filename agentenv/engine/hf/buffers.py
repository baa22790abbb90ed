"""Buffers for the keys and values of the live rows, which grow in large steps up to a limit."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from transformers import Cache

__all__ = ["Pages", "RowBuffers", "SavedRow"]


@dataclass(frozen=True, slots=True, eq=False)
class SavedRow:
    """A copy of the keys and values of one row, except for those that it shares with other rows."""

    keys: tuple[torch.Tensor, ...]
    """Keys of each layer, [heads, length, dim], without those of `shared`."""
    values: tuple[torch.Tensor, ...]
    """Values of each layer, [heads, length, dim], without those of `shared`."""
    length: int
    """Number of columns, with those of `shared`."""
    shared: SavedRow | None = None
    """The beginning of the row, to which other rows refer too; it shares nothing itself."""

    @property
    def nbytes(self) -> int:
        """Size in bytes without that of `shared`."""
        return sum(part.nbytes for part in (*self.keys, *self.values))

    @property
    def own(self) -> int:
        """Number of columns without those of `shared`."""
        return self.length - (0 if self.shared is None else self.shared.length)

    def cut(self, length: int) -> SavedRow:
        """Return the first columns of a row."""
        own = self.own - (self.length - length)
        if self.shared is not None and own < 0:
            return self.shared.cut(length)
        keys, values = (tuple(part[:, :own] for part in of) for of in (self.keys, self.values))
        return SavedRow(keys, values, length, self.shared)


class RowBuffers(Cache):
    """The cache into which a transformers model writes; a `plan_` method comes before each forward pass."""

    # Invariant: live row `r` begins with the columns of `shared[r]`, if there is one. Row `r` of every buffer
    # holds its further keys and values from column 0 on, `own[r]` columns of them; `lengths[r]` counts both.
    # The live rows are rows 0, 1, 2, ... without gaps.
    # Invariant: columns beyond those of a row are zero, so that a mask weight of 0 hides them, and take
    # no memory on the CPU. A row whose numbers are not finite must leave before the next pass, because a mask
    # does not hide NaN (0 * NaN is NaN).
    # Invariant: rows times columns are at most `limit`, as long as the live rows fit into it. While the
    # buffers are made anew, the old and the new tensors of one layer exist at the same time.

    def __init__(self, *, by_tokens: bool = False) -> None:
        super().__init__(layers=[])
        self.by_tokens = by_tokens
        """Whether a row takes memory for its own columns only, and not for those of the longest row."""
        self.limit = sys.maxsize
        """Most rows times columns to allocate; the caller sees to it that the live rows fit into it."""
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.lengths: list[int] = []
        self.shared: list[SavedRow | None] = []
        """What each live row begins with and does not hold itself."""
        self.least_shared = sys.maxsize
        """Fewest columns to which rows refer instead of having copies of them."""
        self._pages: dict[int, Pages] = {}
        """The memory of each buffer, by the identity of its tensor."""
        self._rows = 0
        self._columns = 0
        self._first = 0
        self._width = 0
        self._decode: tuple[torch.Tensor, torch.Tensor] | None = None
        self._prefill: tuple[tuple[int, int], ...] = ()
        self._packed = False
        self._routed_at: int | None = None
        """Index of the tensors that hold the choices of routers, after those of all layers."""
        self._routed_shape = (0, 0)
        self._positions_at: int | None = None
        """Index of the tensors that hold the position after each token, where it is not its column."""

    @property
    def own(self) -> list[int]:
        """Number of columns that each live row holds itself."""
        return [
            length if shared is None else length - shared.length
            for length, shared in zip(self.lengths, self.shared, strict=False)  # other threads read this too
        ]

    def plan_decode(self, device: torch.device) -> int:
        """Make room for one more token in every live row; return the width to attend over."""
        own = self.own
        width = max(own) + 1
        self._reserve(len(own), width)
        rows = torch.arange(len(own), device=device)
        self._packed = False
        self._decode = (rows, torch.tensor(own, device=device))
        self._first, self._width = 0, width
        return width

    def plan_prefill(self, first: int, counts: Sequence[int], *, packed: bool = False) -> int:
        """Make room for new tokens in the rows from `first` on.

        Args:
            first: the first row that gets tokens.
            counts: how many new tokens each row gets.
            packed: whether the input is one row with the tokens of all rows one after the other; otherwise
                it has a left-padded row for each.
        """
        self._packed = packed
        self._prefill = tuple(zip(self.own[first : first + len(counts)], counts, strict=True))
        width = max(length + count for length, count in self._prefill)
        self._reserve(first + len(counts), width)
        self._decode = None
        self._first, self._width = first, width
        return width

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values of a layer and return those to attend over.

        For a packed row these are the buffers of all rows, from which attention takes what belongs to each.
        """
        if layer_idx == len(self.keys):
            self.keys.append(self._new(key_states))
            self.values.append(self._new(value_states))
        rows = slice(self._first, self._first + len(key_states))
        for buffer, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            if self._decode is not None:
                # Each row writes to its own column; one scattered write serves all rows.
                buffer[self._decode[0], :, self._decode[1]] = new[:, :, 0]
            else:
                self._write(buffer, new)
        if self._packed:
            return self.keys[layer_idx], self.values[layer_idx]
        return self.keys[layer_idx][rows, :, : self._width], self.values[layer_idx][rows, :, : self._width]

    def record_routed(self, choices_B1TLK: torch.Tensor) -> None:
        """Write the experts that the tokens of the pass were sent to, beside their keys and values."""
        if self._routed_at is None:
            self._routed_at = len(self.keys)
        self._routed_shape = (choices_B1TLK.shape[3], choices_B1TLK.shape[4])
        flat = choices_B1TLK.flatten(3)
        self.update(flat, flat[..., :0], self._routed_at)

    def routed(self, row: int) -> torch.Tensor:
        """Return the experts that the tokens of a row were sent to, `[length, layers, choices]`."""
        assert self._routed_at is not None
        return self.keys[self._routed_at][row, 0, : self.lengths[row]].unflatten(-1, self._routed_shape)

    def record_positions(self, following_BT: torch.Tensor) -> None:
        """Write the position after each token of the pass, beside its keys and values."""
        if self._positions_at is None:
            self._positions_at = len(self.keys)
        following = following_BT[:, None, :, None]
        self.update(following, following[..., :0], self._positions_at)

    def next_position(self, row: int) -> int:
        """Return the position of the next token of a row, which was recorded; 0 for an empty row."""
        length = self.lengths[row]
        if self._positions_at is None or not length:
            return 0
        return int(self.keys[self._positions_at][row, 0, length - 1, 0])

    def _write(self, buffer: torch.Tensor, new: torch.Tensor) -> None:
        """Write the keys or values of a prefill pass; pads are not stored, so rows have no gaps."""
        end = 0
        for offset, (start, count) in enumerate(self._prefill):
            target = buffer[self._first + offset, :, start : start + count]
            # Pads are on the left of the input. A packed row has none.
            end = end + count if self._packed else new.shape[2]
            target.copy_(new[0 if self._packed else offset, :, end - count : end])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length of the longest live row, which only transformers reads and nothing depends on."""
        return max(self.lengths, default=0)

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for so many further rows of at most so many columns, all in one step."""
        self._reserve(len(self.lengths) + rows, columns)

    def append(self, saved: SavedRow | None) -> int:
        """Add a live row that starts with the columns of a saved one."""
        row = len(self.lengths)
        self.lengths.append(0 if saved is None else saved.length)
        self.shared.append(None if saved is None else saved.shared)
        own = self.own[row]
        self._reserve(row + 1, max(own, 1))
        if saved is not None and own:
            if not self.keys:
                self.keys = [self._new(part[None]) for part in saved.keys]
                self.values = [self._new(part[None]) for part in saved.values]
            for buffers, parts in ((self.keys, saved.keys), (self.values, saved.values)):
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer[row, :, :own].copy_(part)
        return row

    def duplicate(self, row: int) -> int:
        """Add a live row that begins as another; both refer to what they share, where that pays."""
        own = self.own[row]
        if own >= self.least_shared:
            self.shared[row] = self.share(row).shared
            self._give_back(row, 0, own)
        return self.append(self._view(row))

    def share(self, row: int) -> SavedRow:
        """Return a copy of a row from which several rows may begin; they refer to it, where that pays."""
        saved = self.save(row)
        if saved.own < self.least_shared:
            return saved
        if saved.shared is not None:
            keys = zip(saved.shared.keys, saved.keys, strict=True)
            values = zip(saved.shared.values, saved.values, strict=True)
            keys, values = (tuple(torch.cat(parts, 1) for parts in of) for of in (keys, values))
            saved = SavedRow(keys, values, saved.length)
        nothing = saved.cut(0)
        return SavedRow(nothing.keys, nothing.values, saved.length, saved)

    def size_of(self, row: int) -> int:
        """Return the size in bytes that a copy of a row adds at most, with what it shares."""
        shared = self.shared[row]
        return self.own[row] * self._column_bytes + (0 if shared is None else shared.nbytes)

    def save(self, row: int) -> SavedRow:
        """Return a copy of a row; it refers to what the row shares."""
        view = self._view(row)
        keys, values = (tuple(part.clone() for part in of) for of in (view.keys, view.values))
        return replace(view, keys=keys, values=values)

    def remove(self, row: int) -> None:
        """Remove a row; the last live row moves into its place."""
        own = self.own
        last = len(own) - 1
        if row != last:
            self._copy(last, row, own[last])
            self._give_back(row, own[last], own[row])
        self._give_back(last, 0, own[last])
        self.lengths[row], self.shared[row] = self.lengths[last], self.shared[last]
        self.lengths.pop()
        self.shared.pop()

    def _give_back(self, row: int, first: int, end: int) -> None:
        """Free a row's columns from `first` to before `end`."""
        if first < end:
            for buffer in (*self.keys, *self.values):
                self._pages[id(buffer)].give_back(row, first, end)

    def clear(self) -> None:
        """Forget every row and free the memory."""
        self.keys, self.values, self.lengths, self.shared = [], [], [], []
        self._pages.clear()
        self._rows = self._columns = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the live rows take: on the CPU those of the columns that were written."""
        if self.by_tokens:
            shared = {id(one): one.nbytes for one in list(self.shared) if one is not None}
            return sum(self.own) * self._column_bytes + sum(shared.values())
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    @property
    def _column_bytes(self) -> int:
        """Size of one column of one row, in all layers."""
        return sum(
            buffer.shape[1] * buffer.shape[3] * buffer.itemsize for buffer in (*self.keys, *self.values)
        )

    def _view(self, row: int) -> SavedRow:
        """Return a row that still lies in the buffers."""
        own = self.own[row]
        keys, values = (tuple(part[row, :, :own] for part in of) for of in (self.keys, self.values))
        return SavedRow(keys, values, self.lengths[row], self.shared[row])

    def _copy(self, source: int, target: int, length: int) -> None:
        for buffer in (*self.keys, *self.values):
            buffer[target, :, :length].copy_(buffer[source, :, :length])

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, because a masked column still multiplies its value by a weight of 0.
        pages = Pages(like, (self._rows, like.shape[1], self._columns, like.shape[3]))
        self._pages[id(pages.tensor)] = pages
        return pages.tensor

    def _reserve(self, rows: int, columns: int) -> None:
        fits = rows <= self._rows and columns <= self._columns
        if fits and self._rows * self._columns <= self.limit:
            return
        own = self.own
        rows, columns = max(rows, len(own)), max(columns, *own, 1)
        limit = max(self.limit, rows * columns)
        if fits and self._rows * self._columns <= limit:
            return
        kept = [min(length, self._columns) for length in own[: self._rows]]
        self._rows, self._columns = self._size_for(rows, columns, limit)
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                del self._pages[id(old)]
                buffers[layer] = self._new(old)
                # Only what a row holds is copied, because writing takes memory.
                for row, length in enumerate(kept):
                    buffers[layer][row, :, :length].copy_(old[row, :, :length])

    def _size_for(self, rows: int, columns: int, limit: int) -> tuple[int, int]:
        """Return how many rows and columns to allocate: those needed, with room to grow within the limit."""
        # Rows double and columns grow by half, so that copying costs each token a constant share.
        wanted_rows = self._rows if rows <= self._rows else max(4, 1 << (rows - 1).bit_length())
        wanted_columns = self._columns
        if columns > self._columns:
            wanted_columns = whole_columns(max(columns, self._columns * 3 // 2))
        if wanted_rows * wanted_columns > limit:
            # The other rows were many and short, or few and long. The columns come first, because they
            # are what grows with every token; the live rows alone decide how far they may grow.
            wanted_columns = min(wanted_columns, whole_columns(columns * 3 // 2), limit // rows)
            wanted_rows = min(wanted_rows, limit // wanted_columns)
        return wanted_rows, wanted_columns


def whole_columns(columns: int) -> int:
    """Round up to a multiple of 64, so that short answers do not make the buffers grow at every turn."""
    return -(-columns // 64) * 64


# The keys and values of rows of very different lengths stand in one tensor, as wide as the longest row. The
# kernel gives a page of such a tensor when it is first written, so that a short row takes what it has, and
# not what the longest row beside it has. Reading a page that was never written takes no memory.
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
