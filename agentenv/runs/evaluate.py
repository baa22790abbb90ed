"""Evaluate a model with one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from agentenv.core.limits import RunLimits
from agentenv.core.loops import run_sync
from agentenv.core.trajectory import TrajectoryGroup
from agentenv.engine.interface import Sampling
from agentenv.envs.registry import EnvSpec, spec
from agentenv.runner.options import RunnerOptions
from agentenv.runs.eval_config import EvalConfig, EvalSettings, RolloutSettings
from agentenv.runs.evaluation import EvalResult, Evaluation
from agentenv.runs.store.summary import EpisodeSummary

if TYPE_CHECKING:
    from agentenv.runs.store.writer import RunWriter

__all__ = ["evaluate", "new_run", "rollout"]


def evaluate(
    envs: str | EnvSpec | Sequence[str],
    model: str = "mock",
    *,
    num_tasks: int | None = 20,
    group_size: int = 1,
    seed: int = 0,
    env: Mapping[str, Any] | None = None,
    runner: RunnerOptions | Mapping[str, Any] | None = None,
    limits: RunLimits | Mapping[str, Any] | None = None,
    sampling: Sampling | Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    runs_dir: str | Path | None = None,
    on_episode: Callable[[EpisodeSummary], None] | None = None,
    **settings: Unpack[EvalSettings],
) -> EvalResult:
    """Play tasks with a model and return the report and the episodes.

    Args:
        envs: the id, file, module or specification of an environment, or several ids, files or modules.
        model: engine string of the model; `mock`, `random` and `oracle` need no model.
        num_tasks: number of tasks per environment; None means all.
        group_size: number of episodes of each task.
        seed: seed of the run; runs with the same seed give every episode the same seed.
        env: keyword arguments of the environments.
        runner: options of the runner, such as concurrency, history, condenser, user and score.
        limits: limits of each episode.
        sampling: sampling parameters of the completions.
        engine: options of the engine.
        runs_dir: directory in which to store the run; None keeps the episodes in memory.
        on_episode: called with the summary of each episode as it finishes.
        settings: further fields of `EvalConfig`.

    Raises:
        UsageError: An environment does not exist, or a setting is unknown or out of range.
    """
    if isinstance(envs, EnvSpec):
        specs, names = (envs,), (envs.id,)
    else:
        is_one = isinstance(envs, str) or not isinstance(envs, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance]
        names = cast("tuple[str, ...]", (envs,) if is_one else tuple(envs))
        specs = tuple(map(spec, names))
    config = EvalConfig.of(
        envs=names,
        model=model,
        num_tasks=num_tasks,
        group_size=group_size,
        seed=seed,
        env=env or {},
        runner=runner,
        limits=limits,
        sampling=sampling,
        engine=engine or {},
        **settings,
    )
    evaluation = Evaluation(config, specs=specs)
    evaluation.on_episode = on_episode
    if runs_dir is None:
        return run_sync(evaluation.play())
    return _on_disk(evaluation, runs_dir)


def _on_disk(evaluation: Evaluation, runs_dir: str | Path) -> EvalResult:
    """Play an evaluation whose episodes are written to a new run."""
    from agentenv.runs.store.reader import Run
    from agentenv.runs.store.runinfo import RunStatus

    with new_run(evaluation, runs_dir) as writer:
        evaluation.keep_in(writer)
        result = run_sync(evaluation.play())
        writer.close(RunStatus.FAILED if result.stopped else RunStatus.FINISHED, result.stopped)
    return replace(result, run=Run(writer.path))  # read again, because its status has changed


def new_run(evaluation: Evaluation, runs_dir: str | Path) -> RunWriter:
    """Make the run directory of an evaluation."""
    # Loaded with the first run on disk: an evaluation in memory writes and reads nothing.
    from agentenv.runs.made_of import made_of, reward_weights
    from agentenv.runs.store.writer import RunWriter

    config, specs = evaluation.config, evaluation.specs
    record = config.record()
    return RunWriter.create(
        specs[0].id if len(specs) == 1 else "several",
        runs_dir=runs_dir,
        env_ids=tuple(entry.id for entry in specs),
        model=config.model,
        seed=config.seed,
        config=record,
        made_of=made_of(specs, evaluation.tasks, record),
        terms=evaluation.terms,
        reward_weights=reward_weights(specs),
    )


def rollout(
    envs: str | EnvSpec | Sequence[str],
    model: str = "mock",
    *,
    num_tasks: int = 1,
    group_size: int = 1,
    **settings: Unpack[RolloutSettings],
) -> list[TrajectoryGroup]:
    """Play tasks with a model and return the trajectories, in groups and in the order of the tasks.

    The arguments are those of `evaluate`. Failing episodes do not stop the rollout early.
    """
    settings.setdefault("stop_after_failures", 0)
    return list(evaluate(envs, model, num_tasks=num_tasks, group_size=group_size, **settings).groups)
