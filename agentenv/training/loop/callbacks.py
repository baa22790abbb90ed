"""The functions that a trainer calls while it plays and trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from agentenv.core.trajectory import Trajectory
from agentenv.training.given import require_callable

if TYPE_CHECKING:
    from agentenv.workers.reports import Tell

__all__ = ["Callbacks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """Functions of the caller; each is optional.

    With `RunWriter.append` as `on_trajectory` and `RunWriter.annotate` as `on_trained`, the viewer shows the
    run token by token.
    """

    on_metrics: Callable[[int, Mapping[str, float]], None] | None = None
    """Called after each step with its number and the metrics that `step` returned."""
    on_scored: Callable[[Mapping[str, float]], None] | None = None
    """Called before the first step with the scores on held-out tasks, if `eval_on_start` asks for them."""
    on_trajectory: Callable[[Trajectory], None] | None = None
    """Called with each training episode as it finishes."""
    on_held_out: Callable[[Trajectory], None] | None = None
    """Called with each episode of an evaluation on held-out tasks as it finishes."""
    on_trained: Callable[[Trajectory, Mapping[str, object]], None] | None = None
    """Called with each episode of a step after the update, and with a note that holds `step`, `advantage`,
    and the `entropy` and `new_logprobs` of the episode's tokens."""
    on_workers: Tell | None = None
    """Called from time to time with how the driver and each worker are doing."""
    on_servers: Tell | None = None
    """Called from time to time with how each server of the engine is doing."""
    counted: Callable[[], Mapping[str, float]] = dict[str, float]
    """Returns metrics that stand beside those of the first step, such as the memory that a plan counted."""
    about: Mapping[str, object] = field(default_factory=dict[str, object])
    """What trackers keep beside the options, such as the environments and what the rewards are means of."""
    encode: str = ""
    """Name (`module:function`) of what workers make of each record for the caller; `GRPOTrainer.encoded`
    returns it once."""

    def __post_init__(self) -> None:
        require_callable(
            **{
                each.name: getattr(self, each.name)
                for each in fields(self)
                if each.name not in {"about", "encode"}
            }
        )
