"""When and how the held-out tasks are played."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.core.errors import UsageError
from agentenv.core.fields import NonNegativeFloat, NonNegativeInt, PositiveInt, check_fields

__all__ = ["EvaluationOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """When and how the held-out tasks are played.

    Raises:
        UsageError: A value is outside its range, or two options exclude each other.
    """

    eval_steps: NonNegativeInt = 0
    """Number of steps between evaluations on held-out tasks; 0 evaluates only at the end."""
    eval_on_start: bool = True
    """Evaluate also before the first step, where tasks are held out: the model's start, or what the warm-up
    on demonstrations taught it. Its metrics are those of step 0."""
    eval_tasks: NonNegativeInt = 0
    """Number of held-out tasks to evaluate on; 0 means all."""
    eval_temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the evaluations. 0 is greedy, because a run has few held-out tasks and greedy
    scores vary least."""
    num_generations_eval: PositiveInt = 1
    """Number of episodes of each held-out task. With several, `eval/success` is their mean (avg@k), and
    `eval/pass@k` is the chance that at least one of them succeeds; `eval_temperature` must be above 0."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_generations_eval > 1 and not self.eval_temperature:
            raise UsageError(
                f"num_generations_eval={self.num_generations_eval} would play each held-out task several "
                "times with the same tokens, because eval_temperature is 0",
                remedy="set eval_temperature above 0, for example to 1",
            )
