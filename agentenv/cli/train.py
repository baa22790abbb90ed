"""`agentenv train`: train a model with GRPO on environments, with a dashboard; runs can be resumed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer

from agentenv.cli.answer import print_json
from agentenv.cli.dashboard import Dashboard, held_out_lines
from agentenv.cli.memory import MemoryBeside
from agentenv.cli.options import (
    ConfigOption,
    JsonOption,
    RayOption,
    RunsDirOption,
    SeedOption,
    SettingsOption,
    TrustOption,
    WorkerEnvOption,
    WorkersOption,
    in_runs_dir,
    typed,
)
from agentenv.core.errors import DependencyMissing, UsageError
from agentenv.core.settings import build, parse_pairs, read_settings, read_toml
from agentenv.engine.listed import names_servers
from agentenv.runs.report import spending

if TYPE_CHECKING:
    from agentenv.training.request import TrainPlan
    from agentenv.training.run import TrainResult

__all__ = ["run"]


_DEMOS: Any = typer.Option(
    "",
    "--demos",
    metavar="POLICY",
    help="Warm up on oracle (where there is one, the default), FILE.py:FUNCTION or none.",
)
_ENVS: Any = typer.Argument(None, metavar="ENV...", help="Ids, files or modules; ENV=WEIGHT for a mixture.")
_EPISODES: Any = typer.Option(
    8, "-k", "--episodes", min=1, help="Episodes of each task, compared with each other."
)
_GPUS: Any = typer.Option(
    "", "--gpus", help="Divide so many GPUs of this machine between training and vLLM servers."
)
_PARAMETERS = {"max_steps": "steps", "num_generations": "group_size"}
"""Parameter of the command for each setting whose name differs from it."""


def run(
    ctx: typer.Context,
    envs: list[str] = _ENVS,
    model: str = typer.Option(
        "",
        "-m",
        "--model",
        help="smollm2, a directory or Hub id of a causal model, a .gguf file, or the URL of a vLLM server.",
    ),
    steps: int = typer.Option(20, "--steps", help="Training steps."),
    group_size: int = _EPISODES,
    demos: str = _DEMOS,
    num_demos: int | None = typer.Option(
        None, "--num-demos", help="Demonstrations. [default: 128; an oracle's until they are learned]"
    ),
    seed: int = SeedOption,
    settings: list[str] = SettingsOption,
    config: str = ConfigOption,
    workers: int = WorkersOption,
    ray: str = RayOption,
    worker_env: list[str] = WorkerEnvOption,
    gpus: str = _GPUS,
    runs_dir: str = RunsDirOption,
    resume: str = typer.Option("", "--resume", help="Go on with a stopped run from its last checkpoint."),
    trust: bool = TrustOption,
    as_json: bool = JsonOption,
) -> None:
    """Train a model with GRPO on episodes of environments.

    Settings for -o: train.learning_rate=1e-5 and the other fields of GRPOConfig (groups_per_step,
    eval_steps, save_steps), limits.max_turns=3, runner.concurrency=8, runner.condenser=summarise,
    env.NAME for the environment and engine.NAME for the engine. The section may be left out where
    one section alone has the name (max_turns=3), but not of env and engine.
    """
    DependencyMissing.require("torch", "transformers", extra="train", purpose="agentenv train")
    given = {"model": model, "max_steps": steps, "num_generations": group_size, "seed": seed}
    chosen = _typed(ctx, given)
    resumed = _resuming(resume, runs_dir, chosen, trust=trust) if resume else {}
    _look_for(model)
    sources = [given, *([read_toml(config), chosen] if config else [])]
    sources.append(typed(ctx, {"workers": workers, "ray": ray, "worker_env": tuple(worker_env)}, {}))
    options = _options([*sources, parse_pairs(settings or [])], demos, check=not resume)
    options |= {"demos": demos, "num_demos": num_demos, "runs_dir": runs_dir, "resume": resume, **resumed}
    if gpus:
        import_module("agentenv.cli.on_gpus").train_on_gpus(ctx, gpus, options)
    named = options["train"].pop("model")
    chosen_envs = dict(map(_weighted, envs or []))
    board = Dashboard(quiet=as_json or os.environ.get("RANK", "0") != "0", model=named)
    with board:
        result = _trained(board, chosen_envs, named, options)
    _show(result, in_runs_dir(runs_dir), board.drawn, as_json=as_json)
    if result.interrupted:
        raise typer.Exit(130)


def _trained(
    board: Dashboard, envs: Mapping[str, float], model: str, options: Mapping[str, Any]
) -> TrainResult:
    """Load torch, before which mistakes are told, and train."""
    from agentenv.training.loop.launch import LaunchFailed
    from agentenv.training.run import train

    memory = MemoryBeside()

    def begin(plan: TrainPlan) -> dict[str, float]:
        board.begin(plan)
        return memory.begin(plan)

    def step(number: int, metrics: Mapping[str, float]) -> None:
        board.step(number, metrics)
        memory.step(metrics)

    watch: dict[str, Any] = {"on_start": begin, "on_warmup": board.warmed_up, "on_scored": board.scored}
    try:
        return train(envs, model, **options, **watch, on_metrics=step)
    except LaunchFailed:
        raise typer.Exit(1) from None  # the first process prints the error


def _options(sources: Sequence[Mapping[str, Any]], demos: str, *, check: bool) -> dict[str, Any]:
    """Return the settings by section; those that are given now are checked before torch is loaded."""
    from agentenv.training.config import GRPOConfig, refuse_groups_of_one
    from agentenv.training.request import policy_of
    from agentenv.training.sections import TRAIN_SECTIONS

    options: dict[str, Any] = dict(read_settings(sources, TRAIN_SECTIONS))
    policy_of(demos)
    for name, section in TRAIN_SECTIONS.items() if check else ():
        built = None if section.kind is None else build(section.kind, options[name])
        if isinstance(built, GRPOConfig):
            refuse_groups_of_one(built)
    return options


def _look_for(model: str) -> None:
    """Look for a model of a directory or the Hub, so that a wrong name is told before the slow imports."""
    from agentenv.engine.hf.load import directory_of

    if "/" in (path := model.removeprefix("hf:")) and ":" not in path:
        directory_of(path)


def _resuming(resume: str, runs_dir: str, chosen: Mapping[str, Any], *, trust: bool) -> dict[str, Any]:
    """Say what a resumed run executes, and return the options with which it goes on.

    Raises:
        UsageError: Somebody else made the run, and there is no `--trust`.
    """
    from agentenv.cli.trust import announce
    from agentenv.runs.store.reader import find_run

    announce(find_run(resume, runs_dir).info, trust=trust, purpose="resuming")
    # A resumed run keeps its settings. The default of --steps must not make it longer.
    return {"steps": chosen.get("max_steps"), "trust": trust}


def _typed(ctx: typer.Context, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings typed on the command line, which override those of a file.

    A typed model that names a server also overrides the file's engine.
    """
    settings = typed(ctx, given, _PARAMETERS)
    model = settings.get("model", "")
    if names_servers(model) or model.startswith("vllm:"):
        settings["engine"] = ""
    return settings


def _weighted(name: str) -> tuple[str, float]:
    head, equals, weight = name.rpartition("=")
    if not equals:
        return name, 1.0
    try:
        return head, float(weight)
    except ValueError:
        raise UsageError(
            f"{name!r}: the weight {weight!r} of the environment is not a number",
            remedy=f"write a number, as in {head}=2",
        ) from None


def _show(result: TrainResult, where: str, drawn: str, *, as_json: bool) -> None:
    """Print how a training ended. Only the first process of a launch prints.

    Args:
        result: what the training returned.
        where: the option that printed commands need to find the run.
        drawn: how the held-out episodes were sampled.
        as_json: print one JSON object instead.
    """
    if result.run is None:
        return
    run_id = result.run.id
    if as_json:
        head = {"run": run_id, "steps": result.steps_done, "interrupted": result.interrupted}
        head |= {"terms": list(result.run.info.terms)}
        print_json({**head, **(result.history[-1] if result.history else {})})
    elif result.interrupted:
        command = f"agentenv train --resume {run_id}{where}"
        when = f"after step {result.steps_done}"
        if not result.steps_done and result.checkpoint is not None:
            when = "after a part of the warm-up, which is kept and not done again"
        print(f" stopped {when}; continue with: {command}")
    else:
        if result.busiest:
            print(f" {result.busiest}")
        if spent := spending(result.history[-1] if result.history else {}):
            print(f" the server computed {spent}")
        if result.checkpoint is not None:
            print(f" model: {result.checkpoint}; play it with -m hf:{result.checkpoint}")
        print(f" view: agentenv view {run_id}{where}")
        for line in held_out_lines(result.evaluation, drawn, result.evaluation_on_start):
            print(f" {line}")
