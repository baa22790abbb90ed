"""Advantages of groups whose episodes branch: each part of an episode is compared with its siblings.

The episodes of a group form a tree. Its nodes are the parts of episodes between two branchings; siblings are
the parts that begin at the same place: the first parts of all episodes that share nothing, or what an episode
and its branches did from one turn on. The form follows TreeRPO (arXiv 2506.05183): the value of a part is the
reward where nothing follows it, else the mean of the values of what follows, and its advantage compares this
value with those of its siblings. Deviation: the difference is scaled as `scale_rewards` says, like that of
episodes. Tree-GRPO (arXiv 2509.21240) adds a comparison with the leaves of all trees, and ARPO (arXiv
2507.19849) gives a shared part the mean advantage of the episodes that share it; neither is done here.

The tests check these rules:

1. Without branches the result equals that of `group_advantages`.
2. A part without siblings, and one whose siblings have equal values, gets 0.
3. Turns that a branch shares get 0 in the branch: they are trained once, in the episode that sampled them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentenv.training.objective.advantage import group_advantages, scored

__all__ = ["Branched", "branch_advantages"]


@dataclass(frozen=True, slots=True)
class Branched:
    """An episode of a group, with its place in the tree."""

    reward: float | None
    turns: int
    """Number of turns, shared ones included."""
    parent: Hashable = None
    """Index in the group of the episode that sampled the shared turns, None if there are none; another value
    names an episode that is not in the group."""
    shared: int = 0
    """Number of turns that the parent sampled."""


def branch_advantages(
    groups: Sequence[Sequence[Branched]],
    *,
    advantage: Literal["grpo", "rloo"] = "grpo",
    scale_rewards: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
    gather: Callable[[Sequence[float]], Sequence[float]] = list,
) -> list[list[list[float]]]:
    """Return the advantage of each turn of each member of each group.

    Args:
        groups: the members of each group.
        advantage: the baseline of siblings; see `group_advantages`.
        scale_rewards: the standard deviation that the difference is divided by: that of the siblings, that
            over all parts of the batch, or "none".
        eps: number added to the standard deviation.
        gather: as in `group_advantages`.
    """
    trees = [_Tree(group) for group in groups]
    values = [[tree.value(*part) for part in siblings] for tree in trees for siblings in tree.siblings]
    compared = iter(
        group_advantages(values, advantage=advantage, scale_rewards=scale_rewards, eps=eps, gather=gather)
    )
    return [tree.spread([next(compared) for _ in tree.siblings]) for tree in trees]


class _Tree:
    """The tree of a group. A part of it is named by a member and the index of the part's first turn."""

    def __init__(self, group: Sequence[Branched]) -> None:
        self._group = group
        branches: dict[tuple[Hashable, int], list[int]] = defaultdict(list)
        for index, member in enumerate(group):
            branches[self._origin(member)].append(index)
        self.siblings: list[list[tuple[int, int]]] = []
        """The parts that begin at the same place, for each such place."""
        self._after: dict[int, list[int]] = defaultdict(list)
        """For each member, the turns from which others branch off."""
        self._at: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for (parent, turn), members in branches.items():
            parts = [(member, turn) for member in members]
            if isinstance(parent, int):
                parts.insert(0, (parent, turn))
                self._after[parent].append(turn)
                self._at[parent, turn] = parts
            self.siblings.append(parts)

    def _origin(self, member: Branched) -> tuple[Hashable, int]:
        """Return which member sampled the turn before the first one of this member, and that first turn."""
        parent, turn = member.parent, member.shared
        # What branches off a branch within its shared turns branches off the episode that sampled them.
        while isinstance(parent, int) and turn <= self._group[parent].shared:
            parent = self._group[parent].parent
        return (None, 0) if parent is None else (parent, turn)

    def value(self, member: int, start: int) -> float | None:
        """Return the value of a part: the reward, or the mean over the parts that follow it."""
        following = min((turn for turn in self._after[member] if turn > start), default=None)
        if following is None:
            return self._group[member].reward
        known = scored([self.value(*part) for part in self._at[member, following]])
        return sum(known) / len(known) if known else None

    def spread(self, advantages: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return the advantage of each turn of each member, from those of the siblings."""
        result = [[0.0] * member.turns for member in self._group]
        for parts, values in zip(self.siblings, advantages, strict=True):
            for (member, start), value in zip(parts, values, strict=True):
                stops = [turn for turn in self._after[member] if turn > start]
                stop = min([*stops, self._group[member].turns])
                result[member][start:stop] = [value] * (stop - start)
        return result
