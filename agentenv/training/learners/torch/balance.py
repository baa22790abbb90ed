"""Give each process about as many tokens to compute as the others, whichever process played the episodes.

Episodes differ much in length, and an update is as slow as its slowest process. Advantages, optimiser steps
and token weights are decided where a row was played, over whole groups. Only then do single rows move, with
their weights, and their scores come back. So who computes a row changes nothing but the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from agentenv.training.learners.torch.world import World
from agentenv.training.rows import Row

__all__ = ["Exchange", "destinations"]

SLACK = 1.05
"""A process keeps its rows up to this multiple of the mean: moved rows lose prefixes that they share."""


def destinations(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for each row of each process, the process that computes it.

    Rows are dealt longest first. Each stays where it is while that process has no more than its part of the
    tokens, and otherwise goes to the process that has the fewest.

    Args:
        lengths: number of tokens of each row of each process.
    """
    most = SLACK * sum(map(sum, lengths)) / len(lengths)
    loads = [0] * len(lengths)
    chosen = [[home] * len(own) for home, own in enumerate(lengths)]
    order = [(-length, home, index) for home, own in enumerate(lengths) for index, length in enumerate(own)]
    for negative, home, index in sorted(order):
        stays = loads[home] - negative <= most
        target = home if stays else loads.index(min(loads))
        chosen[home][index] = target
        loads[target] -= negative
    return chosen


class _Moved(NamedTuple):
    """A row on its way to another process, or its results on their way back."""

    target: int
    home: int
    place: int
    """Index of the row in its own process."""
    content: Row | tuple[Tensor, ...]


class Exchange:
    """The rows of all processes, dealt out again so that each has about as many tokens.

    All processes make one together.

    Args:
        world: the processes that train together.
        rows: the rows of this process.
    """

    def __init__(self, world: World, rows: Sequence[Row]) -> None:
        self._world, self._own = world, rows
        self.rows = list(rows)
        """The rows that this process computes: those of its own that stay, then those of others."""
        self._stay: list[int] = list(range(len(rows)))
        self._guests: list[_Moved] = []
        if world.size == 1:
            return
        lengths = world.gather([[len(row.token_ids) for row in rows]])
        targets = destinations(lengths)[world.rank]
        leaving = [
            # Scores of an earlier pass may be on the device, and are computed again.
            _Moved(target, world.rank, index, replace(rows[index], new_n=None, entropy_n=None))
            for index, target in enumerate(targets)
            if target != world.rank
        ]
        self._guests = [one for one in world.gather(leaving) if one.target == world.rank]
        self._stay = [index for index, target in enumerate(targets) if target == world.rank]
        guests = [one.content for one in self._guests if isinstance(one.content, Row)]
        self.rows = [rows[index] for index in self._stay] + guests

    def home(self, results: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """Return the results of this process's own rows, whichever process computed them.

        All processes call this method together.

        Args:
            results: the results of `rows`, in their order.
        """
        returned = dict(zip(self._stay, results, strict=False))
        guests = zip(self._guests, results[len(self._stay) :], strict=True)
        leaving = [
            _Moved(one.home, one.home, one.place, tuple(value.cpu() for value in values))
            for one, values in guests
        ]
        for one in self._world.gather(leaving):
            if one.target == self._world.rank and not isinstance(one.content, Row):
                returned[one.place] = one.content
        return [returned[index] for index in range(len(self._own))]
