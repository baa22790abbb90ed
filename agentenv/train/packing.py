"""Micro-batches: rows laid out for one forward pass, padded or packed with their prefixes shared.

Packed rows form a prefix tree: tokens that several rows begin with (the prompt of a group, a system
message, equal first turns, the common part of forks) are computed once. A token attends to its own
ancestors only, and its position is its depth, so every row sees exactly what it would see alone.

The layout is chosen by cost: a pack of L tokens costs L + L^2 * attention + overhead, in units of one
token's pass through the weights; a padded batch of B rows of T tokens costs B * (T + T^2 / 2 *
attention) + overhead, because a causal kernel skips half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentenv.train.batch import Row

__all__ = ["CostModel", "MicroBatch", "pack_rows", "pad_rows", "plan"]

Layout = Literal["auto", "shared", "padded"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a forward pass costs, in units of one token's pass through the weights."""

    attention: float = 3e-4
    """Of one query looking at one key."""
    overhead: float = 32.0
    """Of a pass of its own: small matrix products are slow."""

    def packed(self, tokens: int) -> float:
        """Cost of one pack."""
        return tokens + self.attention * tokens * tokens + self.overhead

    def padded(self, rows: int, width: int) -> float:
        """Cost of one padded batch."""
        return rows * (width + self.attention * width * width / 2) + self.overhead


@dataclass(slots=True)
class MicroBatch:
    """Rows of one forward pass; `index_N` and `labels_N` follow the rows' trained tokens in order."""

    rows: list[Row]
    ids_BT: Tensor
    positions_BT: Tensor | None
    """Depth of each token in its row; None where it is the column."""
    keep_TT: Tensor | None
    """True where a query (row) sees a key (column); None for plain causal attention."""
    index_N: Tensor
    """Flat position, in B * T, of the hidden state that predicts each trained token."""
    labels_N: Tensor
    idle: bool = False
    """Made only so that this rank makes as many passes as the others."""

    @property
    def num_trained(self) -> int:
        """Trained tokens."""
        return self.labels_N.numel()

    @property
    def sequence_N(self) -> Tensor:
        """Index of each trained token's row."""
        counts = torch.tensor([row.num_trained for row in self.rows])
        return torch.repeat_interleave(torch.arange(len(self.rows)), counts)


def plan(
    rows: Sequence[Row], *, layout: Layout, max_tokens: int, cost: CostModel | None = None
) -> list[MicroBatch]:
    """Split rows into micro-batches; every row is in exactly one.

    Args:
        rows: of one optimiser step.
        layout: `shared` packs, `padded` pads, `auto` takes what costs less.
        max_tokens: of one forward pass; a longer single row goes alone.
        cost: of a forward pass.
    """
    cost = cost or CostModel()
    if not rows:
        return []
    if layout == "padded":
        return [pad_rows(part) for part in _padded_parts(rows, max_tokens)]
    packs = _packs(rows, max_tokens, cost)
    if layout == "auto":
        parts = _padded_parts(rows, max_tokens)
        cost_padded = sum(cost.padded(len(part), max(len(r.token_ids) - 1 for r in part)) for part in parts)
        if cost_padded <= sum(cost.packed(size) for _, size in packs):
            return [pad_rows(part) for part in parts]
    return [pack_rows(part) for part, _ in packs]


def pad_rows(rows: Sequence[Row]) -> MicroBatch:
    """Lay rows out side by side, padded on the right, where causal attention never looks."""
    width = max(len(row.token_ids) for row in rows) - 1
    ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
    index: list[Tensor] = []
    labels: list[Tensor] = []
    for number, row in enumerate(rows):
        ids = torch.tensor(row.token_ids)
        ids_BT[number, : len(ids) - 1] = ids[:-1]  # nothing is predicted from the last token
        index.append(number * width + row.positions_n - 1)
        labels.append(ids[row.positions_n])
    return MicroBatch(list(rows), ids_BT, None, None, torch.cat(index), torch.cat(labels))


def pack_rows(rows: Sequence[Row]) -> MicroBatch:
    """Lay rows out as a prefix tree in one sequence."""
    order = sorted(range(len(rows)), key=lambda number: rows[number].token_ids)
    flat: list[int] = []
    depth: list[int] = []
    paths: dict[int, Tensor] = {}
    blocks: list[tuple[Tensor, int]] = []
    previous: list[int] = []
    path = torch.empty(0, dtype=torch.long)
    for number in order:
        ids = rows[number].token_ids[:-1]
        shared = _common_prefix(previous, ids)
        fresh = torch.arange(len(flat), len(flat) + len(ids) - shared)
        path = torch.cat([path[:shared], fresh])
        flat.extend(ids[shared:])
        depth.extend(range(shared, len(ids)))
        paths[number] = path
        blocks.append((path, shared))
        previous = ids
    keep_TT = torch.zeros(len(flat), len(flat), dtype=torch.bool)
    for path, shared in blocks:
        visible = torch.ones(len(path) - shared, len(path), dtype=torch.bool).tril(shared)
        keep_TT[path[shared:, None], path[None, :]] = visible
    index = [paths[number][row.positions_n - 1] for number, row in enumerate(rows)]
    labels = [torch.tensor(row.token_ids)[row.positions_n] for row in rows]
    plain = len(rows) == 1
    return MicroBatch(
        list(rows),
        torch.tensor(flat)[None],
        None if plain else torch.tensor(depth)[None],
        None if plain else keep_TT,
        torch.cat(index),
        torch.cat(labels),
    )


def _common_prefix(left: list[int], right: list[int]) -> int:
    """Return how many tokens two rows begin with in common."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _padded_parts(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Group rows of similar length, so that little is padded."""
    parts: list[list[Row]] = []
    for row in sorted(rows, key=lambda one: len(one.token_ids)):
        if parts and (len(parts[-1]) + 1) * (len(row.token_ids) - 1) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _packs(rows: Sequence[Row], max_tokens: int, cost: CostModel) -> list[tuple[list[Row], int]]:
    """Fill packs in order of the tokens, so that equal prefixes meet; return each with its size."""
    packs: list[tuple[list[Row], int]] = []
    previous: list[int] = []
    for row in sorted(rows, key=lambda one: one.token_ids):
        ids = row.token_ids[:-1]
        if packs:
            members, size = packs[-1]
            grown = size + len(ids) - _common_prefix(previous, ids)
            if grown <= max_tokens and cost.packed(grown) - cost.packed(size) <= cost.packed(len(ids)):
                members.append(row)
                packs[-1] = (members, grown)
                previous = ids
                continue
        packs.append(([row], len(ids)))
        previous = ids
    return packs
