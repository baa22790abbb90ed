"""`agentenv train`: GRPO on an environment, with a dashboard, stopped and resumed at any time."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import typer

from agentenv.cli.options import (
    ConfigOption,
    JsonOption,
    RunsDirOption,
    SeedOption,
    SettingsOption,
    typed,
)
from agentenv.cli.shared_run import Plan, SharedRun
from agentenv.core.errors import DependencyMissing, UsageError
from agentenv.core.imports import import_object
from agentenv.core.settings import Section, build, parse_pairs, read_settings, read_toml
from agentenv.runs.store.runinfo import RunStatus
from agentenv.runs.store.writer import RunWriter

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_PARAMETERS = {"engine": "model", "max_steps": "steps", "num_generations": "group_size"}
"""Of the command, by the setting that each gives."""


@app.command()
def run(
    ctx: typer.Context,
    envs: list[str] = typer.Argument(
        None, metavar="ENV...", help="Ids, files or modules; ENV=WEIGHT for a mixture."
    ),
    model: str = typer.Option(
        "",
        "-m",
        "--model",
        help="Directory or Hub id of a causal model, a .gguf file, or http://HOST:PORT/v1 of a vLLM server.",
    ),
    steps: int = typer.Option(20, "--steps", help="Training steps."),
    group_size: int = typer.Option(
        8, "-k", "--episodes", help="Episodes of each task, compared with each other."
    ),
    demos: str = typer.Option(
        "", "--demos", metavar="MODULE:FUNCTION", help="Warm up on what this policy shows."
    ),
    num_demos: int = typer.Option(128, "--num-demos", help="Tasks that it shows."),
    seed: int = SeedOption,
    settings: list[str] = SettingsOption,
    config: str = ConfigOption,
    runs_dir: str = RunsDirOption,
    resume: str = typer.Option("", "--resume", help="Go on with a stopped run from its last checkpoint."),
    as_json: bool = JsonOption,
) -> None:
    """Train a model with GRPO on episodes of environments.

    Settings for -o: train.learning_rate=1e-5 and the other fields of GRPOConfig (groups_per_step,
    eval_steps, save_steps), limits.max_turns=3, runner.concurrency=8, and env.NAME for the environment.
    The section may be left out where one section alone has the name (max_turns=3), but not of env.
    """
    from agentenv.engine.factory import weights_and_engine

    DependencyMissing.require("torch", "transformers", extra="train", purpose="agentenv train")
    weights, engine = weights_and_engine(model)
    given = {
        "model": weights,
        **({"engine": engine} if engine else {}),
        "max_steps": steps,
        "num_generations": group_size,
        "seed": seed,
    }
    sources = [read_toml(config), typed(ctx, given, _PARAMETERS)] if config else []
    sources.append(parse_pairs(settings or []))
    job = _Job(envs or [], given, sources, demos, num_demos)
    with SharedRun(lambda: job.resume(resume, runs_dir) if resume else job.start(runs_dir)) as shared:
        code = _train(shared, job, as_json=as_json)
    if code:
        raise typer.Exit(code)


class _Job:
    """A training run as the command line names it."""

    def __init__(
        self,
        envs: Sequence[str],
        given: dict[str, Any],
        sources: Sequence[dict[str, Any]],
        demos: str,
        num_demos: int,
    ) -> None:
        self.envs, self.given, self.sources = list(envs), given, sources
        self.demos, self.num_demos = demos, num_demos

    def start(self, runs_dir: str) -> tuple[RunWriter, Plan]:
        """Begin a new run; return its writer and what is to be done."""
        from agentenv.core.limits import RunLimits
        from agentenv.envs.registry import spec
        from agentenv.runner.options import RunnerOptions

        if not self.envs:
            raise UsageError("name at least one environment; `agentenv list` shows what is installed")
        names = dict(map(_weighted, self.envs))
        ids = tuple(spec(name).id for name in names)
        found = read_settings(self.sources, _sections())
        config, limits = build(_grpo_config(), self.given, found["train"]), build(RunLimits, found["limits"])
        runner = build(RunnerOptions, found["runner"])
        if not config.model:
            raise UsageError("no model to train; give one with -m, such as -m ./SmolLM2 or a .gguf file")
        importlib.import_module("agentenv.train.config").refuse_groups_of_one(config)
        _locate(config.model)
        # An address of apprise may hold a password: it is given again with --resume, never written down.
        grpo = {name: value for name, value in asdict(config).items() if name != "notify"}
        record = {"envs": self.envs, "env": found["env"], "grpo": grpo, "demos": self.demos}
        record |= {"limits": asdict(limits), "runner": asdict(runner)}
        writer = RunWriter.create(
            ids[0],
            kind="train",
            root=runs_dir,
            env_ids=ids,
            model=config.model,
            seed=config.seed,
            config=record,
        )
        return writer, Plan(writer.path, config, limits, names, runner=runner, env=found["env"])

    def resume(self, name: str, runs_dir: str) -> tuple[RunWriter, Plan]:
        """Go on with a stopped run; return its writer and what is to be done."""
        from agentenv.core.limits import RunLimits
        from agentenv.runner.options import RunnerOptions
        from agentenv.runs.store.reader import find_run

        run = find_run(name, runs_dir)
        if run.info.kind != "train":
            raise UsageError(f"run {run.id} is an evaluation; resume it with agentenv eval --resume {run.id}")
        record = run.info.config
        checkpoint = last_checkpoint(run.path)
        if checkpoint is None:
            raise UsageError(
                f"run {run.id} has no checkpoint yet; start it again, with -o save_steps=1 to keep more"
            )
        wanted = {**_mapping(record["grpo"]), "output_dir": str(run.path)}
        wanted["max_steps"] = max(wanted["max_steps"], self.given["max_steps"])
        wanted["notify"] = read_settings(self.sources, _sections())["train"].get("notify", ())
        config = build(_grpo_config(), wanted)
        limits = build(RunLimits, _mapping(record["limits"]))
        names = dict(map(_weighted, cast("Sequence[str]", record["envs"])))
        runner = build(RunnerOptions, _mapping(record.get("runner", {})))
        env = _mapping(record.get("env", {}))
        return RunWriter.resume(run.path), Plan(
            run.path, config, limits, names, checkpoint, runner=runner, env=env
        )


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value)


def _weighted(name: str) -> tuple[str, float]:
    head, equals, weight = name.rpartition("=")
    if not equals:
        return name, 1.0
    try:
        return head, float(weight)
    except ValueError:
        raise UsageError(f"{name!r}: the weight of an environment is a number, as in {head}=2") from None


def _grpo_config() -> Any:
    from agentenv.train.config import GRPOConfig

    return GRPOConfig


def _sections() -> Mapping[str, Section]:
    from agentenv.train.sections import TRAIN_SECTIONS

    return TRAIN_SECTIONS


def _locate(model: str) -> None:
    """Refuse a model that is not there before a run directory is made."""
    if model == "mock":
        raise UsageError("mock has no weights to train; give a model with -m, such as -m ./SmolLM2")
    importlib.import_module("agentenv.engine.hf.load").locate(model)


def last_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint of a run."""
    found = [
        path for path in (directory / "checkpoints").glob("step-*") if (path / "trainer_state.json").is_file()
    ]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _train(run: SharedRun, job: _Job, *, as_json: bool) -> int:
    from agentenv.cli.dashboard import Dashboard
    from agentenv.envs.registry import spec
    from agentenv.train.trainer import GRPOTrainer

    config, names = run.plan.config, run.plan.names
    board = Dashboard(config.max_steps, run.id, quiet=as_json or not run.is_first)

    def done(step: int, metrics: Mapping[str, float]) -> None:
        run.collect()
        board.step(step, metrics)

    with board:
        board.say(
            f"{', '.join(names)} · {config.model} · {config.max_steps} steps of {config.groups_per_step}"
            f" tasks × {config.num_generations} · seed {config.seed}   run {run.id}"
        )
        trainer = GRPOTrainer(
            replace(config, output_dir=str(run.plan.path)),
            envs=[(spec(name).with_kwargs(run.plan.env), weight) for name, weight in names.items()],
            limits=run.plan.limits,
            runner=run.plan.runner,
            on_metrics=done,
            on_trajectory=run.append,
            on_trained=run.annotate,
        )
        run.keep_texts(trainer.renderer.tokenizer.backend)
        if run.plan.checkpoint is not None:
            trainer.resume(run.plan.checkpoint)
            board.say(f" resumed at step {trainer.steps_done}")
        elif job.demos:
            _warm_up(trainer, spec(next(iter(names))).with_kwargs(run.plan.env), job, run.plan.limits, board)
        stopped = False
        try:
            history = trainer.train()
        except KeyboardInterrupt:
            stopped, history = True, []
            if trainer.steps_done:
                trainer.save_step()
        run.close(RunStatus.INTERRUPTED if stopped else RunStatus.FINISHED)
    if run.is_first:
        _finish(history, trainer, run.id, stopped=stopped, as_json=as_json)
    return 130 if stopped else 0


def _warm_up(trainer: Any, spec: Any, job: _Job, limits: Any, board: Any) -> None:
    from agentenv.train.loop.sft import demonstrate

    policy: Callable[..., Any] = import_object(job.demos, where="--demos")
    seed = trainer.config.seed
    tasks = [task for task, _ in zip(spec.task_set().shuffle(seed), range(job.num_demos), strict=False)]
    shown = demonstrate(spec, tasks, policy, trainer.renderer, limits=limits, seed=seed)
    board.say(
        f" warm-up on {len(shown)} demonstrations, mean reward "
        f"{sum(one.reward or 0.0 for one in shown) / max(1, len(shown)):.2f}"
    )
    trainer.warmup(shown, steps=max(1, len(shown) // 8), batch_size=8)


def _finish(
    history: Sequence[Mapping[str, float]], trainer: Any, run_id: str, *, stopped: bool, as_json: bool
) -> None:
    last = dict(history[-1]) if history else {}
    if as_json:
        sys.stdout.write(
            json.dumps({"run": run_id, "steps": trainer.steps_done, "interrupted": stopped, **last}) + "\n"
        )
    elif stopped:
        print(f" stopped after step {trainer.steps_done}; go on with: agentenv train --resume {run_id}")
    else:
        if "eval/success" in last:
            print(
                f" held-out success {last['eval/success']:.3f} [{last['eval/success_low']:.3f},"
                f" {last['eval/success_high']:.3f}] on {last['eval/tasks']:.0f} tasks, greedy"
            )
        print(f" view: agentenv view {run_id}")
