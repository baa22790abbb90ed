"""The batches that a training trains on: whole ones, or a stream of groups."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

from agentenv.core.errors import UsageError
from agentenv.core.trajectory import TrajectoryGroup
from agentenv.training.loop.mixture import TaskPosition
from agentenv.training.loop.rollouts import EpisodeBatch, Rollouts

__all__ = ["Batch", "Batches", "WholeBatches", "open_batches"]


class Batch(Protocol):
    """The groups of one step; awaiting it waits until they are finished."""

    def __await__(self) -> Generator[Any, None, object]: ...

    @property
    def groups(self) -> tuple[TrajectoryGroup, ...]:
        """The finished groups that this process played."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """How the batch was played, and what the step waited for."""
        ...

    def trained(self, gather: Callable[[Sequence[Any]], Sequence[Any]]) -> TaskPosition:
        """Return the position of the run once this batch was trained.

        Args:
            gather: returns the values of all processes, which call this method together.
        """
        ...


class Batches(Protocol):
    """Plays the batches of a run."""

    def begin(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0, which may have begun before."""
        ...

    def refill(self) -> bool:
        """Return whether the last batch is played further, because too few of its groups have a gradient."""
        ...

    def go_on(self) -> bool:
        """Begin what may be played while the last batch trains; return whether anything is played then."""
        ...

    def stepped(self) -> TaskPosition | None:
        """Begin what the new weights allow; return the position if that has changed it."""
        ...


class WholeBatches:
    """Plays whole batches: the next one when the last one was trained.

    Args:
        rollouts: plays the groups.
        position: where the run is in its tasks.
    """

    def __init__(self, rollouts: Rollouts, position: TaskPosition) -> None:
        self._rollouts, self._cursors = rollouts, position.cursors
        rollouts.go_on_after(position.rounds)
        self._batch: EpisodeBatch | None = None

    def begin(self, step: int) -> EpisodeBatch:
        """Begin a batch."""
        cursors = self._cursors if self._batch is None else self._batch.cursors
        self._batch = self._rollouts.begin(step, cursors)
        return self._batch

    def refill(self) -> bool:
        """Play further groups for the batch, if too few of its groups have a gradient."""
        return self._batch is not None and self._rollouts.refill(self._batch)

    def go_on(self) -> bool:
        """Begin nothing: the next batch is to be played with the new weights."""
        return False

    def stepped(self) -> None:
        """Begin nothing: a batch begins as a whole."""


def open_batches(rollouts: Rollouts, position: TaskPosition) -> Batches:
    """Return what plays the batches of a run, from this position on.

    Raises:
        UsageError: The checkpoint has groups of another way to play, which this run cannot go on with.
    """
    if rollouts.config.stream.max_ahead:
        from agentenv.training.loop.stream import GroupStream  # loaded here, because few trainings play ahead

        return GroupStream(rollouts, position)
    if position.untrained:
        raise UsageError(
            f"the checkpoint has {len(position.untrained)} groups that a stream dealt and did not train, and "
            "max_ahead=0 plays no stream",
            remedy="go on with max_ahead of at least 1",
        )
    return WholeBatches(rollouts, position)
