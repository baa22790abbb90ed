"""What a caller asks of a training: checked, kept in the run's directory, and opened as a run.

This loads no torch, so that a mistake is told at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agentenv.core.episode_env import Task
from agentenv.core.errors import UsageError
from agentenv.core.fields import SECRET, without_secrets
from agentenv.core.imports import import_object
from agentenv.core.limits import RunLimits
from agentenv.core.playing import MessagePolicy, play_oracle
from agentenv.core.settings import build, options_of
from agentenv.engine.factory import check_options, weights_and_engine
from agentenv.engine.hf.load import locate
from agentenv.envs.registry import registry
from agentenv.envs.registry import spec as find_spec
from agentenv.envs.spec import EnvSpec
from agentenv.envs.tasks import TaskSet
from agentenv.runner.options import RunnerOptions
from agentenv.runner.watchdog import Waiting
from agentenv.runs.made_of import made_of, reward_weights
from agentenv.runs.store.reader import find_run
from agentenv.runs.store.trust import require_trust
from agentenv.runs.store.writer import RunWriter
from agentenv.runs.terms import training_terms
from agentenv.training.config import GRPOConfig, refuse_groups_of_one
from agentenv.training.loop.directories import last_checkpoint, step_of
from agentenv.training.loop.mixture import Envs, weighted

__all__ = ["TrainPlan", "TrainRequest", "policy_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """The settings of an open training run, which are equal in every process of a launch."""

    path: Path
    """The run's directory."""
    envs: Mapping[str, float]
    """Weights of the environments, by the names that the caller used."""
    config: GRPOConfig
    limits: RunLimits
    runner: RunnerOptions
    env: Mapping[str, Any]
    """Keyword arguments of the environments."""
    engine: Mapping[str, Any]
    """Keyword arguments of the engine."""
    demos: str = ""
    """Name of the scripted policy for the warm-up; `none` if there is no warm-up."""
    terms: tuple[str, ...] = ()
    """What the rewards of the training are means of, in words (see `agentenv.runs.terms`)."""
    checkpoint: Path | None = None
    """Checkpoint from which a resumed run continues; None in a new run."""
    waiting: Callable[[], Sequence[Waiting]] | None = field(default=None, compare=False)
    """Returns what the episodes being played wait for; None if this process does not play them."""
    sampled: Callable[[], int] = field(default=int, compare=False)
    """Returns how many tokens the engine has sampled, also of episodes that are not finished."""

    @property
    def id(self) -> str:
        """The run's id."""
        return self.path.resolve().name

    @property
    def resumed_step(self) -> int:
        """Number of the last step before a resumed run continues; 0 in a new run."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    def record(self) -> dict[str, Any]:
        """Return the settings that `run.json` keeps, as plain values."""
        # The run's directory is wherever its files are, so a name of it would be wrong after a move.
        config = {name: value for name, value in asdict(self.config).items() if name != "output_dir"}
        return {
            "envs": dict(self.envs),
            "train": config,
            "limits": asdict(self.limits),
            "runner": self.runner.record(),
            "env": dict(self.env),
            "engine": without_secrets(self.engine),
            "demos": self.demos,
        }


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The arguments of `train` that describe a run."""

    envs: Envs = ()
    model: str = ""
    steps: int | None = None
    group_size: int | None = None
    seed: int | None = None
    train: GRPOConfig | Mapping[str, Any] | None = None
    limits: RunLimits | Mapping[str, Any] | None = None
    runner: RunnerOptions | Mapping[str, Any] | None = None
    env: Mapping[str, Any] = field(default_factory=dict[str, Any])
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    runs_dir: str | Path = "runs"
    resume: str | Path = ""
    demos: str = ""
    trust: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of `GRPOConfig`, which override those of `train`."""

    def open(self) -> tuple[RunWriter, TrainPlan]:
        """Start a new run or resume a stopped one; return its writer and its plan.

        Raises:
            UsageError: An argument does not exist or is out of range. No directory is made in this case.
            StoreError: The run cannot be found or written.
        """
        return self._go_on() if self.resume else self._begin()

    def mixture(self, plan: TrainPlan) -> list[tuple[EnvSpec, float]]:
        """Return the environments, with arguments and weights, that the caller named, or else the plan's."""
        pairs = weighted(self.envs) or list(plan.envs.items())
        return [(_spec(env).with_kwargs(plan.env), weight) for env, weight in pairs]

    def _begin(self) -> tuple[RunWriter, TrainPlan]:
        pairs = weighted(self.envs)
        if not pairs:
            raise UsageError(
                "no environment is named",
                remedy="name at least one environment; `agentenv list` shows what is installed",
            )
        specs = [_spec(env).with_kwargs(self.env) for env, _ in pairs]
        plan = TrainPlan(
            path=Path(),
            envs={env if isinstance(env, str) else env.id: weight for env, weight in pairs},
            config=self._config(),
            limits=options_of(RunLimits, self.limits),
            runner=options_of(RunnerOptions, self.runner),
            env=dict(self.env),
            engine=dict(self.engine),
            demos=_demos(self.demos, specs),
        )
        for spec in specs:
            spec.check_kwargs()
        plan.runner.check_imports()
        refuse_groups_of_one(plan.config)
        if plan.config.report_to:
            from agentenv.training.watch.track import require_trackers

            require_trackers(plan.config.report_to)
        from agentenv.training.elsewhere import learner_form  # here, because it loads torch

        if (form := learner_form(plan.config.model)) is not None:
            form.refuse(plan.config, plan.engine)
        else:
            _check_model(plan.config.model)
        if plan.config.loss.teacher and not plan.config.loss.teacher_is_served:
            locate(plan.config.loss.teacher)
        if plan.config.workers or plan.config.ray:
            from agentenv.workers.start import check_workers, require_cluster

            model = plan.config.engine or f"hf:{plan.config.model}"
            check_workers(plan.config.workers, plan.config.ray, model)
            if ray := plan.config.ray:
                require_cluster(ray, plan.config.worker_env, plan.config.ray_options)
        if plan.engine and not plan.config.engine:
            from agentenv.engine.hf.engine import TransformersEngine

            check_options(TransformersEngine, "the engine in this process", plan.engine)
        return self._write(plan, specs)

    def _write(self, plan: TrainPlan, specs: Sequence[EnvSpec]) -> tuple[RunWriter, TrainPlan]:
        """Make the run's directory, and return its writer and the plan that is complete with it."""
        ids = tuple(spec.id for spec in specs)
        terms = training_terms(specs, plan.config.sampling.temperature, plan.limits)
        config = plan.record()
        writer = RunWriter.create(
            ids[0],
            kind="train",
            runs_dir=self.runs_dir,
            env_ids=ids,
            model=plan.config.model,
            seed=plan.config.seed,
            config=config | {"changed_envs": _changed(self.envs)},
            made_of=made_of(specs, [_finite(spec.task_set()) for spec in specs], config),
            terms=terms,
            reward_weights=reward_weights(specs),
        )
        return writer, _in_directory(replace(plan, terms=terms), writer.path)

    def _config(self) -> GRPOConfig:
        """Return the trainer's configuration; the arguments of `train()` override the fields of `train=`."""
        weights, engine = weights_and_engine(self.model)
        named = {"model": weights or None, "max_steps": self.steps, "num_generations": self.group_size}
        given = {name: value for name, value in {**named, "seed": self.seed}.items() if value is not None}
        config = self.train
        if not isinstance(config, GRPOConfig):
            config = build(GRPOConfig, config or {}, self.settings, given)
        elif self.settings:
            config = build(GRPOConfig, asdict(config), self.settings)
        return replace(config, **given, engine=config.engine or engine)

    def _go_on(self) -> tuple[RunWriter, TrainPlan]:
        run = find_run(self.resume, self.runs_dir)
        if run.info.kind != "train":
            raise UsageError(
                f"run {run.id} is an evaluation", remedy=f"resume it with agentenv eval --resume {run.id}"
            )
        require_trust(run.info, trust=self.trust, purpose="resuming")
        ids = tuple(_spec(env).id for env, _ in weighted(self.envs))
        if ids and ids != tuple(run.info.env_ids):
            raise UsageError(
                f"run {run.id} trains on {', '.join(run.info.env_ids)}, not on {', '.join(ids)}",
                remedy="leave the environment out to resume it",
            )
        checkpoint = last_checkpoint(run.path)
        if checkpoint is None:
            raise UsageError(
                f"run {run.id} has no checkpoint to resume from",
                remedy="start a new run; with -o save_steps=1 it saves a checkpoint after every step",
            )
        record: Mapping[str, Any] = run.info.config
        if not ids:
            _require_ids_enough(run.id, record, run.info.env_ids)
        config = build(GRPOConfig, record["train"], self._changed_on_resume())
        plan = TrainPlan(
            path=run.path,
            envs=record["envs"],
            config=replace(config, max_steps=max(config.max_steps, self.steps or 0)),
            limits=build(RunLimits, record["limits"]),
            runner=build(RunnerOptions, record["runner"]),
            env=record["env"],
            engine={**record["engine"], **_secrets(self.engine)},
            demos=record["demos"],
            terms=run.info.terms,
            checkpoint=checkpoint,
        )
        return RunWriter.resume(run.path), _in_directory(plan, run.path)

    def _changed_on_resume(self) -> dict[str, Any]:
        """Return the settings that a resumed run takes from the caller: where it plays."""
        train = asdict(self.train) if isinstance(self.train, GRPOConfig) else self.train or {}
        where = ("workers", "ray", "worker_env", "ray_options")
        changed = {name: train[name] for name in where if name in train}
        changed |= {name: self.settings[name] for name in where if name in self.settings}
        if "workers" in changed:  # without a cluster they are processes of this machine, whatever was before
            changed.setdefault("ray", "")
        engine = self.settings.get("engine") or train.get("engine")
        if engine:  # its servers may have other addresses now
            changed["engine"] = engine
        return changed


def _finite(tasks: TaskSet) -> Sequence[Task]:
    """Return the tasks of a set; none of an endless one."""
    return () if tasks.endless else tuple(tasks)


def _secrets(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that no record has, which a resumed run takes from the caller."""
    return {name: value for name, value in engine.items() if name in SECRET}


def _in_directory(plan: TrainPlan, path: Path) -> TrainPlan:
    return replace(plan, path=path, config=replace(plan.config, output_dir=str(path)))


def _spec(env: str | EnvSpec) -> EnvSpec:
    return find_spec(env)


def _changed(envs: Envs) -> list[str]:
    """Return the ids of specifications that are not those which their ids name."""
    given = [env for env, _ in weighted(envs) if isinstance(env, EnvSpec)]
    return [env.id for env in given if env.id in registry and _content(env) != _content(registry[env.id])]


def _content(env: EnvSpec) -> str:
    try:
        return env.to_json()
    except UsageError:  # a part has no name
        return repr((dict(env.kwargs), env.limits))


def _require_ids_enough(run_id: str, record: Mapping[str, Any], env_ids: Sequence[str]) -> None:
    """Refuse to resume a run by the ids of its environments if these do not describe them."""
    changed: Sequence[str] = record.get("changed_envs", ())
    if changed or len(record["envs"]) != len(env_ids):
        raise UsageError(
            f"run {run_id} trains on specifications of {', '.join(changed or env_ids)} that differ from what "
            "these ids name",
            remedy="pass the same envs again to resume it",
        )


def _check_model(model: str) -> None:
    """Refuse a model that does not exist, before a run directory is made."""
    if not model:
        raise UsageError(
            "no model to train is named", remedy="name one (-m), such as smollm2, ./SmolLM2 or a .gguf file"
        )
    if model in {"mock", "oracle", "random"} or model.startswith(("policy:", "scripted:")):
        raise UsageError(f"{model} has no weights to train", remedy="name a model (-m), such as smollm2")
    locate(model)


def policy_of(demos: MessagePolicy | str) -> tuple[MessagePolicy | None, str]:
    """Return a scripted policy and its name; no policy if `demos` names none.

    Args:
        demos: the policy, or its name `module:function` or `file.py:function`; `oracle` for the
            environments' own; `none` for no demonstrations; empty means `oracle` where there is one.

    Raises:
        UsageError: The policy cannot be imported.
    """
    if not isinstance(demos, str):
        return demos, f"{demos.__module__}:{getattr(demos, '__qualname__', type(demos).__qualname__)}"
    if demos == "none":
        return None, demos
    if demos in {"", "oracle"}:
        return play_oracle, demos
    return import_object(demos, where="demos"), demos


def _demos(demos: str, specs: Sequence[EnvSpec]) -> str:
    """Return the name of the demonstrations of a run; empty demonstrations become `oracle` or `none`.

    Raises:
        UsageError: Oracles are asked for, and no environment has one.
    """
    has_oracle = any(spec.oracle is not None for spec in specs)
    if demos == "oracle" and not has_oracle:
        specs[0].require_oracle()
    return demos or ("oracle" if has_oracle else "none")
