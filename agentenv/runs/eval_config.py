"""Settings of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

from annotated_types import Ge

from agentenv.core.errors import UsageError
from agentenv.core.fields import NonNegativeInt, PositiveInt, check_fields, without_secrets
from agentenv.core.limits import RunLimits
from agentenv.core.settings import build, options_of
from agentenv.engine.interface import Sampling
from agentenv.runner.options import RunnerOptions
from agentenv.runs.store.summary import EpisodeSummary

__all__ = ["EvalConfig", "EvalSettings", "RolloutSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Configuration of an evaluation.

    Raises:
        UsageError: A number is out of range, or no environment is named.
    """

    envs: tuple[str, ...]
    """Ids, files or modules of the environments."""
    model: str = "mock"
    """Engine string of the model, such as `hf:PATH`, `vllm:PATH` or a URL.

    `mock`, `random` and `oracle` need no model."""
    tokenizer: str | None = None
    """Directory of the tokenizer; None means the model's own."""
    num_tasks: Annotated[int, Ge(1), "-n 0 plays all tasks"] | None = 20
    """Number of tasks per environment; None means all."""
    group_size: PositiveInt = 1
    """Number of episodes of each task."""
    split: str = ""
    """Split of the tasks; empty means the held-out split if there is one, otherwise the default split."""
    seed: int = 0
    """Seed of the run, from which the seeds of all episodes are derived."""
    success_at: float = 1.0
    """Least reward that counts as a success."""
    stop_after_failures: NonNegativeInt = 3
    """Stop if the first episodes, this many, all fail with the same error; 0 means never.

    They are the first episodes of different tasks as long as there are enough tasks.
    """
    workers: NonNegativeInt = 0
    """Number of worker processes that play the episodes; 0 plays them in this process. `runner.concurrency`
    limits the episodes of all workers together."""
    ray: str = ""
    """Address of a Ray cluster on which the workers are placed, or `auto` for the one that this machine
    belongs to; empty for processes of this machine."""
    worker_env: tuple[str, ...] = ()
    """Names of environment variables that the actors of a Ray cluster get from this process; their values are
    not recorded. Processes of this machine have all of them."""
    ray_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of Ray for each worker: `num_cpus`, `num_gpus`, `memory`, `resources`, `label_selector` and
    `runtime_env`."""
    runner: RunnerOptions = field(default_factory=RunnerOptions)
    """Options of the runner, such as the concurrency, the condenser and the user."""
    limits: RunLimits = field(default_factory=RunLimits)
    """Limits of each episode."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling parameters of the completions."""
    env: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the environments."""
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of the engine. Those that may be secrets are not recorded; see `without_secrets`."""

    def __post_init__(self) -> None:
        if not self.envs:
            raise UsageError(
                "no environment is named",
                remedy="name at least one environment, such as agentenv/Calculator-v0",
            )
        check_fields(self)

    def record(self) -> dict[str, Any]:
        """Return the configuration as plain values, for `run.json`."""
        record = asdict(replace(self, runner=RunnerOptions(), engine=without_secrets(self.engine)))
        record["runner"] = self.runner.record()
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> EvalConfig:
        """Return the configuration that `record` wrote.

        Raises:
            UsageError: The record is not the configuration of an evaluation.
        """
        try:
            return cls.of(**record)
        except (TypeError, UsageError) as error:
            raise UsageError(
                f"the configuration of this run cannot be read: {error}", remedy="start a new evaluation"
            ) from error

    @classmethod
    def of(
        cls,
        *,
        runner: RunnerOptions | Mapping[str, Any] | None = None,
        limits: RunLimits | Mapping[str, Any] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        **values: Any,
    ) -> EvalConfig:
        """Make a configuration whose sections may be mappings of their fields.

        Raises:
            UsageError: A name is unknown, or a value does not fit its field.
        """
        sections = {
            "runner": options_of(RunnerOptions, runner),
            "limits": options_of(RunLimits, limits),
            "sampling": options_of(Sampling, sampling),
        }
        return build(cls, {**values, **sections})


class EvalSettings(TypedDict, total=False):
    """Fields of `EvalConfig` that `evaluate` takes besides its named arguments, for checkers of types."""

    tokenizer: str | None
    split: str
    success_at: float
    stop_after_failures: int
    workers: int
    ray: str
    worker_env: Sequence[str]
    ray_options: Mapping[str, Any]


class RolloutSettings(EvalSettings, total=False):
    """Arguments of `evaluate` that `rollout` passes on."""

    seed: int
    env: Mapping[str, Any] | None
    runner: RunnerOptions | Mapping[str, Any] | None
    limits: RunLimits | Mapping[str, Any] | None
    sampling: Sampling | Mapping[str, Any] | None
    engine: Mapping[str, Any] | None
    runs_dir: str | Path | None
    on_episode: Callable[[EpisodeSummary], None] | None
