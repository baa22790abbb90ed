"""`agentenv eval`: play tasks with a model, show the progress, and report the results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from agentenv.cli.answer import print_json
from agentenv.cli.options import (
    ConfigOption,
    JsonOption,
    ModelOption,
    RayOption,
    RunsDirOption,
    SeedOption,
    SettingsOption,
    TrustOption,
    WorkerEnvOption,
    WorkersOption,
    in_runs_dir,
    refuse_model,
    typed,
)
from agentenv.core.errors import UsageError
from agentenv.core.loops import run_blocking
from agentenv.core.settings import parse_pairs, read_settings, read_toml

if TYPE_CHECKING:
    from agentenv.runs.eval_config import EvalConfig
    from agentenv.runs.store.reader import Run

__all__ = ["run"]

CREW = ("workers", "ray", "worker_env", "ray_options")
"""Settings of where episodes are played, which change no result."""
REACHED = "base_url api_key headers retry_s timeout_s concurrency requests_per_minute tokens_per_minute"
CHANGEABLE = {
    "eval": {"stop_after_failures", *CREW},
    "engine": {*REACHED.split(), "request_timeout_s", "hang_s", "min_servers", "start_timeout_s"},
    "runner": {"concurrency", "retries", "retry_wait_s", "close_timeout_s", "warn_after_s"},
}
"""Settings by section that change no result, so that a resumed run may have other ones."""


def run(
    ctx: typer.Context,
    envs: list[str] = typer.Argument(
        None, metavar="ENV...", help="Ids, path/to/file.py, file.py:Class or module:Class."
    ),
    model: str = ModelOption,
    num_tasks: int = typer.Option(
        20, "-n", "--tasks", help="Number of tasks of each environment; 0 for all."
    ),
    group_size: int = typer.Option(1, "-k", "--episodes", min=1, help="Number of episodes of each task."),
    seed: int = SeedOption,
    split: str = typer.Option("", "--split", help="Split of the tasks; the held-out one if empty."),
    settings: list[str] = SettingsOption,
    config: str = ConfigOption,
    tokenizer: str = typer.Option(
        "", "--tokenizer", help="Directory of the tokenizer; the model's own if empty."
    ),
    workers: int = WorkersOption,
    ray: str = RayOption,
    worker_env: list[str] = WorkerEnvOption,
    runs_dir: str = RunsDirOption,
    resume: str = typer.Option("", "--resume", help="Continue a stopped run with its own settings."),
    # Hidden, because it is for the one error that names it.
    resume_anyway: bool = typer.Option(False, "--resume-anyway", hidden=True),
    trust: bool = TrustOption,
    fail_under: float = typer.Option(None, "--fail-under", help="Exit with 1 if the mean reward is lower."),
    as_json: bool = JsonOption,
) -> None:
    """Play tasks of environments with a model and report the results.

    Settings for -o: env.NAME for the environment, runner.concurrency=8, runner.condenser=summarise,
    runner.score=file.py:name, limits.max_turns=4, sampling.temperature=0, engine.NAME for the engine,
    eval.success_at=0.5. The section name may be left out if only one section has the setting (max_turns=4),
    but not for env and engine.
    """
    given: dict[str, Any] = {
        "envs": tuple(envs or ()),
        "model": model,
        "num_tasks": num_tasks or None,
        "group_size": group_size,
        "seed": seed,
        "split": split,
        "tokenizer": tokenizer or None,
    }
    crew = {"workers": workers, "ray": ray, "worker_env": tuple(worker_env)}
    said = typed(ctx, given, {}) if config or resume else {}
    sources = [read_toml(config), said] if config else [said]
    sources.append(typed(ctx, crew, {}))
    code = _evaluate(
        given,
        [*sources, parse_pairs(settings or [])],
        resume,
        runs_dir,
        fail_under,
        anyway=resume_anyway,
        trust=trust,
        as_json=as_json,
    )
    if code:
        raise typer.Exit(code)


def eval_config(given: Mapping[str, Any], sources: Sequence[Mapping[str, Any]]) -> EvalConfig:
    """Return the configuration of the command line.

    Args:
        given: values of the command's options; every source overrides them.
        sources: settings that `read_toml` and `parse_pairs` returned; later sources override earlier ones.

    Raises:
        UsageError: A setting is unknown, or its value does not fit.
    """
    from agentenv.runs.eval_config import EvalConfig
    from agentenv.runs.sections import EVAL_SECTIONS

    sections = read_settings(sources, EVAL_SECTIONS)
    return EvalConfig.of(**{**given, **sections.pop("eval"), **sections})


def _evaluate(
    given: dict[str, Any],
    sources: Sequence[dict[str, Any]],
    resume: str,
    runs_dir: str,
    fail_under: float | None,
    *,
    anyway: bool,
    trust: bool,
    as_json: bool,
) -> int:
    from agentenv.cli.progress import EvalProgress
    from agentenv.envs.registry import spec
    from agentenv.runs.evaluate import new_run
    from agentenv.runs.evaluation import Evaluation
    from agentenv.runs.made_of import made_of, refuse_changed
    from agentenv.runs.store.reader import find_run
    from agentenv.runs.store.runinfo import RunStatus
    from agentenv.runs.store.writer import RunWriter

    run = find_run(resume, runs_dir) if resume else None
    config = eval_config(given, sources) if run is None else _resumed(run, sources, trust=trust)
    for name in config.envs:
        refuse_model(name, "an environment", f"agentenv eval ENVIRONMENT -m {name}")
    specs = [spec(name) for name in config.envs]
    progress = EvalProgress(quiet=as_json)
    with progress.loading(config.model):
        evaluation = Evaluation(config, specs=specs)
    if run is not None and not anyway:
        refuse_changed(run.info, made_of(specs, evaluation.tasks, run.info.config))
    with new_run(evaluation, runs_dir) if run is None else RunWriter.resume(run.path) as writer:
        evaluation.on_episode = progress.episode
        evaluation.keep_in(writer)
        evaluation.on_begin = partial(progress.begin, evaluation, writer.id)
        interrupted = False
        try:
            with progress:
                result = run_blocking(evaluation.play())
        except KeyboardInterrupt:
            interrupted = True
            result = evaluation.result()
        status = RunStatus.FAILED if result.stopped else RunStatus.FINISHED
        status = RunStatus.INTERRUPTED if interrupted else status
        writer.close(status, result.stopped)
    named = writer.id + in_runs_dir(runs_dir)
    return _show(result, evaluation, named, fail_under, interrupted=interrupted, as_json=as_json)


def _resumed(run: Run, sources: Sequence[Mapping[str, Any]], *, trust: bool) -> EvalConfig:
    """Return the configuration of a run that is resumed, with what was given anew and changes no result.

    Raises:
        UsageError: The run is no evaluation or is not trusted, or a setting would change its results.
    """
    from agentenv.cli.trust import announce
    from agentenv.runs.eval_config import EvalConfig
    from agentenv.runs.sections import EVAL_SECTIONS

    if run.info.kind != "eval":
        remedy = "start a new evaluation without --resume"
        if run.info.kind == "train":
            remedy = f"resume it with agentenv train --resume {run.id}"
        raise UsageError(f"run {run.id} is not an evaluation", remedy=remedy)
    announce(run.info, trust=trust, purpose="resuming")
    now = read_settings(sources, EVAL_SECTIONS)
    stored: dict[str, Any] = {**run.info.config}
    others = [
        name if section == "eval" else f"{section}.{name}"
        for section, settings in now.items()
        for name, value in settings.items()
        if name not in CHANGEABLE.get(section, ())
        and not _is_same(value, (stored if section == "eval" else stored.get(section, {})).get(name))
    ]
    if others == ["envs"]:
        raise UsageError(
            f"run {run.id} plays {', '.join(stored['envs'])}, not {', '.join(now['eval']['envs'])}",
            remedy="leave the environment out to resume the run",
        )
    if others:
        may = ", ".join(name if kind == "eval" else f"{kind}.{name}" for kind, name in _changeable())
        raise UsageError(
            f"run {run.id} was played with another {' and another '.join(sorted(others))}",
            remedy=f"leave it out, or start a new run; a resumed run may have another {may}",
        )
    changed = {name: value for name, value in now["eval"].items() if name in CHANGEABLE["eval"]}
    if "workers" in changed:  # without a cluster, they are processes of this machine, whatever played before
        changed.setdefault("ray", "")
    for section in ("engine", "runner"):
        changed[section] = {**stored.get(section, {}), **now[section]}
    return EvalConfig.from_record({**stored, **changed})


def _changeable() -> list[tuple[str, str]]:
    return [(section, name) for section, names in CHANGEABLE.items() for name in sorted(names)]


def _is_same(value: object, stored: object) -> bool:
    """Return whether a setting is what a run recorded, in which tuples are lists."""
    return json.dumps(value, default=str) == json.dumps(stored, default=str)


def _show(
    result: Any, evaluation: Any, named: str, fail_under: float | None, *, interrupted: bool, as_json: bool
) -> int:
    """Print the result and return the exit code; `named` is the run as a command has to name it."""
    from agentenv.cli.tables import print_report

    report = result.report
    mean = report.reward.mean if report.reward else None
    low = fail_under is not None and (mean is None or mean < fail_under)
    if as_json:
        ending = {"stopped": result.stopped, "interrupted": interrupted}
        plain = {"run": named.partition(" ")[0], **ending, **report.as_json()}
        print_json(plain)
    else:
        notes: list[str] = []
        if interrupted:
            kept = f"stopped: {report.num_episodes} of {evaluation.num_episodes} episodes are kept"
            notes.append(f"{kept}; continue with: agentenv eval --resume {named}")
        if result.stopped:
            notes.append(f"stopped: {result.stopped}")
        if low:
            notes.append(f"mean reward {mean if mean is None else round(mean, 4)} is lower than {fail_under}")
        print_report(report, run=named, notes=notes)
    if interrupted:
        return 130
    return 1 if low or result.stopped or not report.num_scored else 0
