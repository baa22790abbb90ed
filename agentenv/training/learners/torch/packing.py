"""Micro-batches: rows laid out for one forward pass, either padded or packed with shared prefixes.

Packed rows form a prefix tree, so that tokens which several rows begin with (the prompt of a group, a system
message, equal first turns, the common part of forks) are computed once. A token attends only to its own
ancestors, and its position is its depth, so every row is computed exactly as if it were alone.

The layout is chosen by cost, in units of one token's pass through the weights: tokens + attention * pairs of
a query and a key + overhead of the pass. A causal kernel skips half of the pairs of a padded row. Attention
over the tree computes only pairs in which the query sees the key, and flex attention whole blocks of pairs.
Neither computes more where rows are packed together, so a pack takes rows as long as it has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from agentenv.core.images import ImageTokens
from agentenv.training.learners.torch.attention import BLOCK, Node, Way
from agentenv.training.rows import Row, TokenSupports

__all__ = ["CostModel", "MicroBatch", "pack_rows", "pad_rows", "plan"]

Layout = Literal["auto", "shared", "padded"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of a forward pass, in units of one token's pass through the weights."""

    attention: float = 3e-4
    """Cost of one pair of a query and a key."""
    overhead: float = 32.0
    """Fixed cost of a pass, because small matrix products are slow."""
    branch: float = 1.0
    """Cost of each row of a tree, because each branch has attention calls of its own."""
    way: Way = "tree"
    """How attention over a pack is computed, which decides how many pairs are."""

    def packed(self, tokens: int, pairs: float, rows: int) -> float:
        """Return the cost of one pack, in which `pairs` queries see a key."""
        if self.way == "flex":
            # A query also computes the rest of the block in which its row begins, and of that in which it is
            # itself, half a block each on average.
            return tokens + self.attention * (pairs + BLOCK * tokens) + self.overhead
        return tokens + self.attention * pairs + self.branch * rows + self.overhead

    def padded(self, rows: int, width: int) -> float:
        """Return the cost of one padded batch."""
        return rows * (width + self.attention * width * width / 2) + self.overhead


@dataclass(slots=True)
class MicroBatch:
    """Rows of one forward pass; `index_N` and `labels_N` follow the rows' trained tokens in order."""

    rows: list[Row]
    ids_BT: Tensor
    positions_BT: Tensor | None
    """Depth of each token in its row; None if it equals the column."""
    tree: tuple[Node, ...] | None
    """The prefix tree of a pack; None for plain causal attention."""
    index_N: Tensor
    """Flat position, in B * T, of the hidden state that predicts each trained token."""
    labels_N: Tensor
    routed_TLK: Tensor | None = None
    """Experts that each of the B * T tokens is sent to in each layer, -1 where the routers choose; None if
    they do everywhere."""
    images: tuple[tuple[ImageTokens, ...], ...] = ()
    """The images of each of the B rows, by their columns; empty if there are none."""
    idle: bool = False
    """Whether the micro-batch exists only so that this rank makes as many passes as the others."""

    @property
    def num_trained(self) -> int:
        """Number of trained tokens."""
        return self.labels_N.numel()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the pass computes, without padding."""
        if self.tree is not None:
            return self.ids_BT.numel()
        return sum(len(row.token_ids) - 1 for row in self.rows)  # nothing is predicted from the last token

    @property
    def real_T(self) -> Tensor:
        """Which of the B * T tokens are no padding."""
        if self.tree is not None:
            return torch.ones(self.ids_BT.numel(), dtype=torch.bool)
        sizes = torch.tensor([len(row.token_ids) - 1 for row in self.rows])
        return (torch.arange(self.ids_BT.shape[1]) < sizes[:, None]).flatten()

    @property
    def supports_N(self) -> TokenSupports | None:
        """What each trained token was sampled from; None if all from the whole vocabulary."""
        return TokenSupports.joined((row.supports, row.num_trained) for row in self.rows)


def plan(
    rows: Sequence[Row], *, layout: Layout, max_tokens: int, cost: CostModel | None = None
) -> list[MicroBatch]:
    """Split rows into micro-batches; every row is in exactly one.

    Args:
        rows: the rows of one optimiser step.
        layout: `shared` packs, `padded` pads, `auto` uses the cheaper layout.
        max_tokens: largest number of tokens in one forward pass; a longer row gets a pass of its own.
        cost: cost model of a forward pass.
    """
    cost = cost or CostModel()
    if not rows:
        return []
    if layout == "padded":
        return [pad_rows(part) for part in _padded_parts(rows, max_tokens)]
    packs = _packs(rows, max_tokens)
    if layout == "auto":
        parts = _padded_parts(rows, max_tokens)
        cost_padded = sum(cost.padded(len(part), max(len(r.token_ids) - 1 for r in part)) for part in parts)
        if cost_padded <= sum(pack.cost(cost) for pack in packs):
            return [pad_rows(part) for part in parts]
    return [pack_rows(pack.rows) for pack in packs]


def pad_rows(rows: Sequence[Row]) -> MicroBatch:
    """Return rows as a padded batch. Padding is on the right, where causal attention never looks."""
    width = max(len(row.token_ids) for row in rows) - 1
    ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
    index: list[Tensor] = []
    labels: list[Tensor] = []
    for number, row in enumerate(rows):
        ids = torch.tensor(row.token_ids)
        ids_BT[number, : len(ids) - 1] = ids[:-1]  # nothing is predicted from the last token
        index.append(number * width + row.positions_n - 1)
        labels.append(ids[row.positions_n])
    routed = _routed([(row, 0) for row in rows], width)
    images = tuple(row.images for row in rows) if any(row.images for row in rows) else ()
    return MicroBatch(list(rows), ids_BT, None, None, torch.cat(index), torch.cat(labels), routed, images)


def pack_rows(rows: Sequence[Row]) -> MicroBatch:
    """Return rows as a prefix tree in one sequence."""
    # Sorted rows are a walk through the tree in depth-first order: what a row shares with any earlier row, it
    # shares with the one right before it. So a stack of segments is all that is kept of the rows before.
    order = sorted(range(len(rows)), key=lambda number: _order(rows[number]))
    flat: list[int] = []
    depths: list[Tensor] = []
    indices: dict[int, Tensor] = {}
    # Invariant: the segments of `path` cover the previous row from depth 0 to its end.
    path: list[_Segment] = []
    nodes: list[Node] = []
    computed: list[tuple[Row, int]] = []
    images: list[ImageTokens] = []
    for number in order:
        ids = rows[number].token_ids[:-1]
        shared = _shared(computed[-1][0], rows[number]) if computed else 0
        nodes += _cut(path, shared, len(flat))
        if shared < len(ids):
            path.append(_Segment(len(flat), shared, len(ids)))
        images += [one.moved(len(flat) - shared) for one in rows[number].images if one.offset >= shared]
        flat += ids[shared:]
        depths.append(torch.arange(shared, len(ids)))
        indices[number] = torch.cat([torch.arange(at, at + bottom - top) for at, top, bottom in path])
        computed.append((rows[number], shared))
    nodes += _cut(path, 0, len(flat))
    # A row alone is plain causal attention, for which the model has faster kernels than for a tree.
    plain = len(rows) == 1
    return MicroBatch(
        list(rows),
        torch.tensor(flat)[None],
        None if plain else torch.cat(depths)[None],
        None if plain else tuple(nodes),
        torch.cat([indices[number][row.positions_n - 1] for number, row in enumerate(rows)]),
        torch.cat([torch.tensor(row.token_ids)[row.positions_n] for row in rows]),
        _routed(computed),
        (tuple(images),) if images else (),
    )


def _routed(rows: Sequence[tuple[Row, int]], width: int | None = None) -> Tensor | None:
    """Return the experts that the tokens of rows are sent to; None if the routers choose everywhere.

    Args:
        rows: the rows in their order, each with the number of its first tokens that are left out.
        width: number of tokens to which each row is padded; None pads none.
    """
    known = next((row.routed_experts for row, _ in rows if row.routed_experts is not None), None)
    if known is None:
        return None
    parts: list[Tensor] = []
    for row, start in rows:
        size = len(row.token_ids) - 1
        part_TLK = torch.full((width or size, known.layers, known.choices), -1, dtype=torch.int32)
        if row.routed_experts is not None:
            part_TLK[:size] = torch.from_numpy(row.routed_experts.array().astype("int32"))
        parts.append(part_TLK[start:])
    return torch.cat(parts)


class _Segment(NamedTuple):
    """Adjacent tokens on the path of the current row: from depth `top` to `bottom`, at index `at`."""

    at: int
    top: int
    bottom: int


def _cut(path: list[_Segment], depth: int, end: int) -> list[Node]:
    """Cut a path at a depth; return the part below as nodes, whose descendants all lie before `end`."""
    below: list[Node] = []
    while path and path[-1].bottom > depth:
        at, top, bottom = path.pop()
        cut = max(top, depth)
        below.append(Node(at + cut - top, at + bottom - top, end))
        if cut > top:
            path.append(_Segment(at, top, cut))
    return below


def _order(row: Row) -> tuple[list[int], bytes]:
    """Return the key by which rows with equal prefixes become neighbours."""
    routed = row.routed_experts
    return row.keys, b"" if routed is None else routed.data


def _shared(left: Row, right: Row) -> int:
    """Return the number of first tokens of two rows that can be computed once.

    Rows whose routers are replayed share tokens only as far as these were sent to the same experts. So each
    row is computed as if it were alone, also if its prompt was computed more than once by the engine.
    """
    # An image is shared whole or not at all, because its keys differ from those of any other from the first.
    tokens = _common_prefix(left.keys[:-1], right.keys[:-1])
    one, other = left.routed_experts, right.routed_experts
    if one is None or other is None:
        return tokens if one is other else 0
    return min(tokens, _common_prefix(one.data, other.data) // one.token_bytes)


def _common_prefix(left: list[int] | bytes, right: list[int] | bytes) -> int:
    """Return the number of first values that two rows have in common."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    # Halving compares slices, which C does: a loop over 10,000 tokens would take longer than their packing.
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _padded_parts(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Return parts of rows with similar length, so that there is little padding."""
    parts: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.token_ids)):
        # Rows come by length, so this one is the longest so far, and all are padded to it.
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


def _packs(rows: Sequence[Row], max_tokens: int) -> list[_Pack]:
    """Fill packs in the order of the rows' tokens, so that rows with equal prefixes are neighbours."""
    packs: list[_Pack] = []
    previous: Row | None = None
    for row in sorted(rows, key=_order):
        size = len(row.token_ids) - 1
        alone = _Pack([row], size, size**2 / 2)
        packs.append(alone)
        if previous is not None:
            joined = _joined(packs[-2], alone, _shared(previous, row))
            if joined.tokens <= max_tokens:
                packs[-2:] = [joined]
        previous = row
    return _filled(packs, max_tokens)


def _filled(packs: list[_Pack], max_tokens: int) -> list[_Pack]:
    """Put packs, the longest first, into the first one with room for them."""
    filled: list[_Pack] = []
    for pack in sorted(packs, key=lambda pack: -pack.tokens):
        for index, other in enumerate(filled):
            joined = _joined(other, pack, 0)
            if joined.tokens <= max_tokens:
                filled[index] = joined
                break
        else:
            filled.append(pack)
    return filled


def _joined(pack: _Pack, further: _Pack, shared: int) -> _Pack:
    """Return a pack with further rows, which share `shared` first tokens with its last row."""
    return _Pack(
        pack.rows + further.rows,
        pack.tokens + further.tokens - shared,
        pack.pairs + further.pairs - shared**2 / 2,
    )
