"""Micro-batches: rows laid out for one forward pass, padded or packed with their prefixes shared.

Packed rows form a prefix tree: tokens that several rows begin with (the prompt of a group, a system
message, equal first turns, the common part of forks) are computed once. A token attends to its own
ancestors only, and its position is its depth, so every row sees exactly what it would see alone.

The layout is chosen by cost, in units of one token's pass through the weights: tokens + attention *
pairs of a query and a key + overhead of the pass. A causal kernel skips half of the pairs of a padded
row; attention over the tree computes those that see each other; a block mask computes all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from agentenv.train.batch import Row
from agentenv.train.model.attention import Node

__all__ = ["CostModel", "MicroBatch", "pack_rows", "pad_rows", "plan"]

Layout = Literal["auto", "shared", "padded"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a forward pass costs, in units of one token's pass through the weights."""

    attention: float = 3e-4
    """Of one query looking at one key."""
    overhead: float = 32.0
    """Of a pass of its own: small matrix products are slow."""
    branch: float = 1.0
    """Of each row of a tree, which is attended to on its own."""
    block_mask: bool = False
    """A pack's attention computes every pair at once, whether they see each other or not."""

    def packed(self, tokens: int, pairs: float, rows: int) -> float:
        """Cost of one pack, of which so many pairs see each other."""
        if self.block_mask:
            return tokens + self.attention * tokens * tokens + self.overhead
        return tokens + self.attention * pairs + self.branch * rows + self.overhead

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
    tree: tuple[Node, ...] | None
    """The prefix tree of a pack; None for plain causal attention."""
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
        if cost_padded <= sum(pack.cost(cost) for pack in packs):
            return [pad_rows(part) for part in parts]
    return [pack_rows(pack.rows) for pack in packs]


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
    depths: list[Tensor] = []
    places: dict[int, Tensor] = {}
    path: list[_Segment] = []
    nodes: list[Node] = []
    previous: list[int] = []
    for number in order:
        ids = rows[number].token_ids[:-1]
        shared = _common_prefix(previous, ids)
        nodes += _cut(path, shared, len(flat))
        if shared < len(ids):
            path.append(_Segment(len(flat), shared, len(ids)))
        flat += ids[shared:]
        depths.append(torch.arange(shared, len(ids)))
        places[number] = torch.cat([torch.arange(at, at + bottom - top) for at, top, bottom in path])
        previous = ids
    nodes += _cut(path, 0, len(flat))
    plain = len(rows) == 1
    return MicroBatch(
        list(rows),
        torch.tensor(flat)[None],
        None if plain else torch.cat(depths)[None],
        None if plain else tuple(nodes),
        torch.cat([places[number][row.positions_n - 1] for number, row in enumerate(rows)]),
        torch.cat([torch.tensor(row.token_ids)[row.positions_n] for row in rows]),
    )


class _Segment(NamedTuple):
    """Tokens of the path to the row being laid out, from one depth to another, side by side."""

    at: int
    top: int
    bottom: int


def _cut(path: list[_Segment], depth: int, end: int) -> list[Node]:
    """Cut a path at a depth; return what was below as nodes, whose descendants now all lie before `end`."""
    below: list[Node] = []
    while path and path[-1].bottom > depth:
        at, top, bottom = path.pop()
        cut = max(top, depth)
        below.append(Node(at + cut - top, at + bottom - top, end))
        if cut > top:
            path.append(_Segment(at, top, cut))
    return below


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


@dataclass(slots=True)
class _Pack:
    """Rows in order of their tokens, with the cost of their tree."""

    rows: list[Row]
    tokens: int
    pairs: float

    def cost(self, model: CostModel) -> float:
        return model.packed(self.tokens, self.pairs, len(self.rows))


def _packs(rows: Sequence[Row], max_tokens: int, cost: CostModel) -> list[_Pack]:
    """Fill packs in order of the tokens, so that equal prefixes meet."""
    packs: list[_Pack] = []
    previous: list[int] = []
    for row in sorted(rows, key=lambda one: one.token_ids):
        ids = row.token_ids[:-1]
        alone = _Pack([row], len(ids), len(ids) ** 2 / 2)
        packs.append(alone)
        if len(packs) > 1:
            joined = _joined(packs[-2], alone, _common_prefix(previous, ids))
            if joined.tokens <= max_tokens and joined.cost(cost) <= packs[-2].cost(cost) + alone.cost(cost):
                packs[-2:] = [joined]
        previous = ids
    return packs


def _joined(pack: _Pack, alone: _Pack, shared: int) -> _Pack:
    """Return the pack with one more row, which begins like the last one in so many tokens."""
    return _Pack(
        pack.rows + alone.rows,
        pack.tokens + alone.tokens - shared,
        pack.pairs + alone.pairs - shared**2 / 2,
    )
