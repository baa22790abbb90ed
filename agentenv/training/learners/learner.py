"""What the algorithm needs of whatever holds the weights in training.

`agentenv.training.step` computes advantages and one weight a token, and says when to step. A learner computes
log-probabilities and gradients and changes the weights: `learners.torch` on this machine, another one
wherever its weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from agentenv.training.config import GRPOConfig
from agentenv.training.metrics import Meter
from agentenv.training.objective.loss import LossInputs
from agentenv.training.rows import Row, Scores

__all__ = ["BringsWeights", "KeepsFiles", "Learner", "LossFn", "Processes", "ScoresRows"]

T = TypeVar("T")

LossFn = Callable[[LossInputs], torch.Tensor]
"""Function of the user that returns the surrogate loss of each token, `[N]`."""


@runtime_checkable
class ScoresRows(Protocol):
    """The reference of the KL term, or what takes its place."""

    def score(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return the log-probabilities of each row's trained tokens."""
        ...


class Processes(Protocol):
    """The processes that train together."""

    rank: int
    size: int

    sharded: bool
    """Whether each of them holds a part of the weights only."""

    def total(self, value: float) -> float:
        """Return the sum of the processes' values."""
        ...

    def gather(self, values: Sequence[T]) -> list[T]:
        """Return the values of all processes, those of the first one first."""
        ...

    def merge(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of all processes as one."""
        ...


class Learner(Protocol):
    """Holds the weights in training, their optimiser and the reference."""

    config: GRPOConfig
    reference: ScoresRows | None
    """Scores rows for the KL term; None if there is no such term."""
    weights_version: int
    """Counter that grows by one whenever the weights change."""

    @property
    def adapter(self) -> str | None:
        """Name of the adapter in training, for requests to an engine; None if it needs none."""
        ...

    @property
    def torn(self) -> bool:
        """Whether a step was broken off, or is being written: some weights are new and others not."""
        ...

    @property
    def world(self) -> Processes:
        """The processes that train together."""
        ...

    @property
    def max_length(self) -> int | None:
        """Length of the longest sequence that the model accepts; None if there is no limit."""
        ...

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary."""
        ...

    def score(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return the log-probabilities of each row's trained tokens under the current weights."""
        ...

    def forward_backward(
        self, rows: Sequence[Row], meter: Meter, *, loss_fn: LossFn | None = None, moved: bool = False
    ) -> tuple[float, list[Scores]]:
        """Compute the gradient of the rows' loss, in which each token counts with its row's weight.

        Args:
            rows: the rows of one optimiser step.
            meter: collects the sums of the loss's metrics.
            loss_fn: the user's surrogate loss, if any.
            moved: whether an earlier update of the same batch has changed the weights.

        Returns:
            This process's part of the loss, and the scores of its rows.
        """
        ...

    def optim_step(self, rate: float) -> float | None:
        """Apply the gradient of all processes at a learning rate; return its norm before clipping.

        A gradient that is 0 or not finite changes nothing, and `weights_version` stays. The norm is None if
        the learner does not know it.
        """
        ...

    def separate_optimizer(self, config: GRPOConfig) -> AbstractContextManager[Any]:
        """Step with another optimiser in this context; the usual one starts afresh afterwards."""
        ...


@runtime_checkable
class BringsWeights(Protocol):
    """A learner that itself gives an engine its weights."""

    def bring(self, engine: Any) -> None:
        """Let the engine sample from the weights as they are now."""
        ...


@runtime_checkable
class KeepsFiles(Protocol):
    """A learner that itself writes and reads the weights and the optimiser of a checkpoint."""

    def save_files(self, directory: Path) -> Mapping[str, Any]:
        """Write them into a directory; return what `load_files` needs, as JSON values."""
        ...

    def load_files(self, record: Mapping[str, Any]) -> None:
        """Go on from what `save_files` wrote."""
        ...
