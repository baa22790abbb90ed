"""Train a model with GRPO in a run directory, which can be stopped, resumed and viewed.

The run directory holds every finished episode, the metrics, the checkpoints, and the results of each update
for each episode (advantages, entropy, new log-probabilities), which the viewer shows token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from agentenv.core.errors import UsageError
from agentenv.core.limits import RunLimits
from agentenv.core.loops import blocking
from agentenv.core.trajectory import Trajectory
from agentenv.core.visible import logger, one_line
from agentenv.engine.interface import features_of
from agentenv.runner.options import RunnerOptions
from agentenv.runner.watchdog import Waiting
from agentenv.runs.store.reader import Run
from agentenv.runs.store.runinfo import RunStatus
from agentenv.runs.store.summary import ENCODE
from agentenv.training.config import GRPOConfig
from agentenv.training.loop.callbacks import Callbacks
from agentenv.training.loop.directories import last_checkpoint
from agentenv.training.loop.ending import ended_by_signals, saved_if_it_ends_early
from agentenv.training.loop.mixture import Envs
from agentenv.training.loop.shared_run import SharedRun
from agentenv.training.request import TrainPlan, TrainRequest, policy_of
from agentenv.training.trainer import GRPOTrainer

if TYPE_CHECKING:
    from agentenv.training.loop.sft import DemonstrationPolicy
    from agentenv.training.settings import TrainSettings

__all__ = ["TrainResult", "train"]

log = logger(__name__)

DEMOS = 128
"""Number of demonstrations without `num_demos`."""
ROUNDS = 4
"""Number of times, without `num_demos`, that an oracle's demonstrations are shown again, at most."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a training run."""

    history: tuple[Mapping[str, float], ...]
    """Metrics of each step of this call. Those of a resumed run's earlier steps are in the run directory."""
    run: Run | None
    """The run with its episodes, metrics and checkpoints; only the first process of a launch has it, the
    others have None."""
    steps_done: int
    """Number of steps of the whole run, earlier calls included."""
    checkpoint: Path | None
    """The newest checkpoint, a plain Hugging Face directory; None if no checkpoint was saved."""
    interrupted: bool = False
    """Whether Ctrl-C stopped the run. A checkpoint of the last whole step was written then."""
    evaluation_on_start: Mapping[str, float] = field(default_factory=dict[str, float])
    """The scores before the first step, with `eval_on_start`; empty otherwise."""

    @property
    def evaluation(self) -> dict[str, float]:
        """The last step's scores on held-out tasks, such as `eval/success`; empty if there are none."""
        last = self.history[-1] if self.history else {}
        return {name: value for name, value in last.items() if name.startswith("eval/")}

    @property
    def busiest(self) -> str:
        """What this call spent most of its time on, as a sentence; empty if it made no step."""
        from agentenv.training.watch.bounds import busiest_bound

        return busiest_bound(self.history)

    def __repr__(self) -> str:
        last = self.history[-1] if self.history else {}
        scores = [f"{name} {last[name]:.3g}" for name in ("reward", "eval/success") if name in last]
        run = None if self.run is None else f"run {self.run.id}"
        return one_line(self, f"{self.steps_done} steps", *scores, run, self.checkpoint)


def train(
    envs: Envs = (),
    model: str = "",
    *,
    steps: int | None = None,
    group_size: int | None = None,
    seed: int | None = None,
    demos: DemonstrationPolicy | str = "",
    num_demos: int | None = None,
    runs_dir: str | Path = "runs",
    resume: str | Path = "",
    trust: bool = False,
    train: GRPOConfig | Mapping[str, Any] | None = None,
    limits: RunLimits | Mapping[str, Any] | None = None,
    runner: RunnerOptions | Mapping[str, Any] | None = None,
    env: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    on_start: Callable[[TrainPlan], Mapping[str, float] | None] | None = None,
    on_warmup: Callable[[Sequence[Trajectory]], None] | None = None,
    on_scored: Callable[[Mapping[str, float]], None] | None = None,
    on_metrics: Callable[[int, Mapping[str, float]], None] | None = None,
    **settings: Unpack[TrainSettings],
) -> TrainResult:
    """Train a model with GRPO on episodes of environments, and return the result.

    Args:
        envs: an id, a file, a module or an `EnvSpec`; a list of these; or a mapping of names to weights.
        model: a directory, a Hub id, a .gguf file, or http://HOST:PORT/v1 of a vLLM server.
        steps: number of training steps; a resumed run can only become longer.
        group_size: number of episodes of each task, which are compared with each other.
        seed: seed of the run.
        demos: a policy to imitate first, or its name; empty for the environments' oracles, `none` for none.
        num_demos: number of demonstrations, of few tasks several times; None: 128, oracles' until learned.
        runs_dir: directory of all runs; the processes of torchrun write one run.
        resume: id or path of a stopped run, which continues with the settings that it has.
        trust: execute what the resumed run names, although another user or machine made the run.
        train: the trainer's options; `model`, `steps`, `group_size`, `seed` and further fields override them.
        limits: limits of each episode.
        runner: options such as the number of concurrent episodes, history, condenser, user and score.
        env: keyword arguments of the environments.
        engine: keyword arguments of the engine.
        on_start: called with the open run's plan; it may return metrics that stand beside the first step's.
        on_warmup: called with the demonstrations to imitate before the model is trained on them.
        on_scored: called before the first step with the held-out scores, if `eval_on_start` asks for them.
        on_metrics: called after each step with its number and metrics.

    Raises:
        UsageError: An argument is wrong, or the run to resume comes from elsewhere and is not trusted.
        TrainingFailed: No episode was usable in several batches in a row, or everything was dropped.
    """
    policy, shown_by = policy_of(demos)
    given = (train, limits, runner, env or {}, engine or {}, runs_dir, resume, shown_by, trust)
    request = TrainRequest(envs, model, steps, group_size, seed, *given, settings)
    with SharedRun(request.open) as run:
        training = _Training(run, request, on_start, on_scored=on_scored, on_metrics=on_metrics)
        with training.to_its_end():
            blocking()(training.begin(policy, num_demos, on_warmup).run())
        return training.result


class _Training:
    """A training in an open run; only the process that writes the run calls the callbacks."""

    def __init__(
        self,
        run: SharedRun[TrainPlan],
        request: TrainRequest,
        on_start: Callable[[TrainPlan], Mapping[str, float] | None] | None,
        *,
        on_scored: Callable[[Mapping[str, float]], None] | None,
        on_metrics: Callable[[int, Mapping[str, float]], None] | None,
    ) -> None:
        self._run, self._on_scored, self._on_metrics = run, on_scored, on_metrics
        self._envs = request.mixture(run.plan)
        self._asked_for_demos = bool(request.demos)
        self._history: list[Mapping[str, float]] = []
        self._start: Mapping[str, float] = {}
        self._interrupted = False
        self.result: TrainResult
        self._trainers: list[GRPOTrainer] = []  # empty until it is made, which takes a while
        plan = run.plan
        counted: Mapping[str, float] = {}
        if run.is_first and on_start is not None:
            counted = on_start(replace(plan, waiting=self.waiting, sampled=self.sampled)) or {}
        self.trainer = GRPOTrainer(
            plan.config,
            engine_options=plan.engine,
            envs=self._envs,
            limits=plan.limits,
            runner=plan.runner,
            callbacks=Callbacks(
                on_metrics=self._stepped,
                on_scored=self._scored,
                on_trajectory=self._keep,
                on_held_out=self._keep_held_out,
                on_trained=run.annotate,
                on_workers=run.log_workers,
                on_servers=run.log_servers,
                counted=lambda: counted,
                about={"envs": dict(plan.envs), "terms": plan.terms},
                encode=ENCODE,
            ),
        )
        self._trainers.append(self.trainer)
        tokenizer = self.trainer.renderer.tokenizer
        run.keep_texts(tokenizer.backend, tokenizer.image_settings)

    def waiting(self) -> Sequence[Waiting]:
        """Return what the episodes being played wait for."""
        return [wait for trainer in self._trainers for wait in trainer.waiting()]

    def sampled(self) -> int:
        """Return how many tokens the engine has sampled; 0 if it does not tell."""
        return sum(counts() for one in self._trainers if (counts := features_of(one.engine).sampled))

    def begin(
        self,
        policy: DemonstrationPolicy | None,
        num_demos: int | None,
        on_warmup: Callable[[Sequence[Trajectory]], None] | None,
    ) -> GRPOTrainer:
        """Load the checkpoint of a resumed run, or train a new run on demonstrations if it has a policy.

        Returns:
            The trainer, which goes on from there.

        Raises:
            UsageError: The caller asked for demonstrations, and none can be imitated; or an oracle earned
                less than the full marks.
        """
        plan, trainer = self._run.plan, self.trainer
        if plan.checkpoint is not None:
            trainer.resume(plan.checkpoint)
        elif policy is not None and plan.demos != "none":
            good, others = self._demonstrations(policy, num_demos)
            reasons = ", ".join(f"{number} {reason}" for reason, number in others.items())
            if others:
                log.warning("%d demonstrations are not imitated: %s", sum(others.values()), reasons)
            if not good and self._asked_for_demos:
                raise UsageError(
                    f"no demonstration can be imitated: {reasons or 'there are no tasks'}",
                    remedy="raise the limit that cut them, correct the policy, or use none",
                )
            if not good:
                return trainer
            if self._run.is_first and on_warmup is not None:
                on_warmup(good)
            times = max(1, (num_demos or DEMOS) // (len(good) + sum(others.values())))
            steps = max(1, len(good) * times // 8)
            # What an oracle shows is right, so that it may be learned by heart.
            rounds = ROUNDS if plan.demos == "oracle" and num_demos is None else 1
            trainer.warmup(good, steps=steps, max_steps=rounds * steps, batch_size=8)
        return trainer

    def _demonstrations(
        self, policy: DemonstrationPolicy, num_demos: int | None
    ) -> tuple[list[Trajectory], dict[str, int]]:
        """Return what `sort_out` does of the demonstrations, the same in all processes.

        The first process plays them: in another one they may end differently, and processes that make
        different numbers of steps would wait for each other for ever.
        """
        from agentenv.training.loop.sft import sort_out  # here, because few trainings begin with a warm-up

        least = self._run.plan.config.demo_min_reward
        played = [sort_out(self._shown(policy, num_demos or DEMOS), least)] if self._run.is_first else []
        return self.trainer.world.gather(played)[0]

    def _shown(self, policy: DemonstrationPolicy, num_demos: int) -> list[Trajectory]:
        """Play the demonstrations and keep them in the run; oracles play each environment that has one."""
        from agentenv.training.loop.sft import demonstrate, require_full_marks

        plan, seed = self._run.plan, self._run.plan.config.seed
        envs = self._envs[:1]
        if plan.demos == "oracle":
            envs = [(spec, weight) for spec, weight in self._envs if spec.oracle is not None]
        total = sum(weight for _, weight in envs)
        shown: list[list[Trajectory]] = []
        for spec, weight in envs:
            tasks = islice(spec.task_set().shuffle(seed), max(1, round(num_demos * weight / total)))
            renderer = self.trainer.renderer
            shown.append(demonstrate(spec, tasks, policy, renderer, limits=plan.limits, seed=seed))
        for trajectory in chain.from_iterable(shown):
            self._run.append(trajectory)
            self._run.annotate(trajectory, {"role": "demonstration"})
        if plan.demos == "oracle" and plan.config.demo_min_reward is None:
            for (spec, _), episodes in zip(envs, shown, strict=True):
                require_full_marks(episodes, getattr(spec.make(), "full_marks", 1.0))
        return [*chain.from_iterable(shown)]

    def _keep(self, trajectory: Trajectory) -> None:
        self._run.append(trajectory, self.trainer.encoded(trajectory))

    def _keep_held_out(self, trajectory: Trajectory) -> None:
        """Keep a held-out episode in the run; each evaluation has groups of its own."""
        self.trainer.encoded(trajectory)  # of no use, because the group has another name
        group_id = f"held-out-{self.trainer.steps_done}:{trajectory.group_id}"
        kept = replace(trajectory, group_id=group_id)
        self._run.append(kept)
        self._run.annotate(kept, {"role": "held-out"})

    def _scored(self, scores: Mapping[str, float]) -> None:
        self._run.collect()
        self._start = scores
        if self._run.is_first and self._on_scored is not None:
            self._on_scored(scores)

    def _stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.collect()
        self._history.append(metrics)
        if self._run.is_first and self._on_metrics is not None:
            self._on_metrics(step, metrics)

    @contextmanager
    def to_its_end(self) -> Generator[None]:
        """Train in this context, to the end or until something ends the run early; then `result` is there.

        A signal is no error: the run can go on from the step that was saved.
        """
        with ended_by_signals(self.trainer, partial(self._run.close, RunStatus.INTERRUPTED)) as settle:
            try:
                with saved_if_it_ends_early(self.trainer, settle):
                    yield
            except KeyboardInterrupt:
                self._interrupted = True
            self.result = self._finish()

    def _finish(self) -> TrainResult:
        """Close the run and return the result."""
        self._run.close(RunStatus.INTERRUPTED if self._interrupted else RunStatus.FINISHED)
        path = self._run.plan.path
        return TrainResult(
            tuple(self._history),
            Run(path) if self._run.is_first else None,
            self.trainer.steps_done,
            last_checkpoint(path),
            self._interrupted,
            self._start,
        )
