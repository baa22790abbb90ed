"""Values of groups that are computed once, although each refill of a batch and the step ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from agentenv.core.errors import UsageError
from agentenv.core.trajectory import TrajectoryGroup

__all__ = ["OncePerGroup"]

T = TypeVar("T")


class OncePerGroup(Generic[T]):
    """Keeps the values of the groups of one step.

    Args:
        total: sums a number over all processes.
    """

    def __init__(self, total: Callable[[float], float]) -> None:
        self._total = total
        # Invariant: an entry holds its group, so the group's id belongs to no other object.
        self._held: dict[int, tuple[TrajectoryGroup, T]] = {}

    def get(
        self, groups: Sequence[TrajectoryGroup], function: Callable[[Sequence[TrajectoryGroup]], Sequence[T]]
    ) -> list[T]:
        """Return one value for each group, and call the function for the groups that have none yet.

        All processes call the function if one of them has such groups, because it may communicate.

        Raises:
            UsageError: The function did not return one value for each group.
        """
        new = [group for group in groups if id(group) not in self._held]
        if self._total(len(new)):
            values = function(new)
            if len(values) != len(new):
                raise UsageError(
                    f"the advantage function returned {len(values)} lists for {len(new)} groups: it must "
                    "return one advantage for each member of each group"
                )
            self._held |= {id(group): (group, value) for group, value in zip(new, values, strict=True)}
        return [self._held[id(group)][1] for group in groups]

    def forget(self) -> None:
        """Drop all values."""
        self._held.clear()
