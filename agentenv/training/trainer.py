"""The trainer: play groups of episodes, update the weights, bring them to the engine, and repeat.

`agentenv.training.step` is the algorithm, and knows no environment, engine or text. `GRPOTrainer` adds the
parts that play episodes (`loop.rollouts`), bring weights to the engine (`loop.sync`) and write results
(`loop.journal`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from agentenv.core.errors import ModelNotFound, UsageError
from agentenv.core.limits import RunLimits
from agentenv.core.loops import run_blocking
from agentenv.core.settings import options_of
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.engine.hf.threads import dismiss_team
from agentenv.engine.interface import Engine, features_of
from agentenv.render.renderer import Renderer
from agentenv.runner.options import RunnerOptions
from agentenv.runner.watchdog import Waiting
from agentenv.training.batch import AdvantageFn
from agentenv.training.config import GRPOConfig, refuse_groups_of_one
from agentenv.training.elsewhere import LearnerElsewhere, learner_form
from agentenv.training.given import (
    own_tokenizer,
    require_engine,
    require_function_of_one,
    require_kind,
    require_model,
)
from agentenv.training.learners.torch.learner import TorchLearner
from agentenv.training.learners.torch.world import World, own_device, raise_together
from agentenv.training.loading import find_model, find_teacher, find_vision, load_tokenizer, require_reloads
from agentenv.training.loop.batches import Batch, open_batches
from agentenv.training.loop.callbacks import Callbacks
from agentenv.training.loop.checkpoint import load_checkpoint, save_checkpoint
from agentenv.training.loop.directories import prune_checkpoints
from agentenv.training.loop.ending import ended_by_signals, saved_if_it_ends_early
from agentenv.training.loop.event_loop import beside_the_loop
from agentenv.training.loop.journal import Journal
from agentenv.training.loop.mixture import Mixture, TaskPosition
from agentenv.training.loop.rollouts import PlayOptions, Rollouts
from agentenv.training.loop.sync import held_still, open_engine
from agentenv.training.loop.usable import UsableEpisodes
from agentenv.training.objective.loss import LossInputs
from agentenv.training.rate import default_rate, with_learning_rate
from agentenv.training.step import GRPO
from agentenv.training.stop import stop
from agentenv.training.watch.notes import episode_notes
from agentenv.training.watch.warn import TaskLedger, require_agreement

if TYPE_CHECKING:
    from agentenv.training.loop.sft import WarmupOptions

__all__ = ["GRPOTrainer"]


class GRPOTrainer:
    """Trains a causal language model on trajectory groups; see `agentenv.training` for the options.

    Tokenizers and processors of transformers, paths and mappings of fields are made objects of ours. What
    cannot be used is refused here, before anything is played.

    Raises:
        ModelNotFound: The model cannot be loaded.
        UsageError: No model is named, it cannot be trained, or an environment's weight is not positive.
    """

    def __init__(
        self,
        config: GRPOConfig,
        *,
        model: Any = None,
        tokenizer: Any = None,
        engine: Engine | None = None,
        engine_options: Mapping[str, Any] | None = None,
        envs: Any = None,
        tasks: Any = None,
        eval_tasks: Any = None,
        limits: RunLimits | Mapping[str, Any] | None = None,
        runner: RunnerOptions | Mapping[str, Any] | None = None,
        advantage_fn: AdvantageFn | None = None,
        loss_fn: Callable[[LossInputs], torch.Tensor] | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.config = config = options_of(GRPOConfig, config)
        require_kind("callbacks", Callbacks, callbacks)
        require_kind("engine_options", Mapping, engine_options)
        require_engine(engine)
        require_function_of_one(advantage_fn=advantage_fn, loss_fn=loss_fn)
        require_model(model)
        self.tokenizer = own_tokenizer(tokenizer)
        self.engine = engine
        """The engine that generates episodes; if none was passed, it is made when it is first needed."""
        self.position = TaskPosition()
        """The tasks that were used so far."""
        self._ledger = TaskLedger()
        self._mixture = None if envs is None else Mixture(envs, tasks=tasks, eval_tasks=eval_tasks)
        self._callbacks = callbacks or Callbacks()
        self._play_options = PlayOptions(
            options_of(RunLimits, limits), options_of(RunnerOptions, runner), self._callbacks
        )
        self._engine_options = engine_options
        self._renderer: Renderer | None = None
        self._rollouts: Rollouts | None = None
        self._saved_step = 0
        self.learner = self._open(model)
        if envs is not None and self.tokenizer is None and not self.model_name:
            raise UsageError(
                "a model that is passed as an object needs its tokenizer", remedy="pass tokenizer=..."
            )
        self.grpo = GRPO[Any](self.learner, self.config, advantage_fn=advantage_fn, loss_fn=loss_fn)

    def _open(self, model: Any) -> TorchLearner | LearnerElsewhere:
        """Return the learner, on this machine or elsewhere, which also brings its engine."""
        config, tokenizer = self.config, self.tokenizer
        named = model or config.model
        if (form := learner_form(named)) is not None:
            self.config = config = with_learning_rate(config, None)
            if self.engine is not None:
                raise UsageError(f"{named} is sampled at its own server", remedy="pass no engine")
            self.model_name = named
            learner, self.engine, self.tokenizer = form.open(named, config, tokenizer, self._engine_options)
            return learner
        own_device()
        try:
            self.model_name, loaded, unread = find_model(model, config)
            require_reloads(loaded)
            teacher = find_teacher(config, self.model_name, tokenizer)
            vision = find_vision(loaded, self.model_name, tokenizer)
        except Exception as error:  # noqa: BLE001 - it is raised when the others know
            raise_together(error, config.device)
        self.config = config = with_learning_rate(config, loaded)
        return TorchLearner(
            loaded, config, teacher=teacher, held_still=self._held_still, unread=unread, vision=vision
        )

    def step(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        demonstrations: Sequence[Trajectory] = (),
        sft_coef: float = 1.0,
    ) -> dict[str, float]:
        """Train on one batch and return its metrics.

        Args:
            groups: the episodes, from any source.
            demonstrations: trajectories trained by cross entropy in the same update.
            sft_coef: weight of their mean cross entropy beside the policy loss.

        Raises:
            UsageError: The trajectories were made with another tokenizer or at another temperature.
        """
        metrics, batch = self.grpo.step(groups, demonstrations, sft_coef)
        if (on_trained := self._callbacks.on_trained) is not None:
            for trajectory, note in episode_notes(groups, batch):
                on_trained(trajectory, {"step": self.steps_done, **note})
        return metrics

    # A whole run --------------------------------------------------------------------------

    def train(self) -> list[dict[str, float]]:
        """Play, step, sync, evaluate and save until `max_steps`; return each step's metrics.

        A resumed trainer continues from its checkpoint. The last step's metrics include the evaluation on
        held-out tasks, if there are any. Whatever ends the run early, its last whole step is saved.

        Raises:
            UsageError: There is no environment to play, or a group has one episode only.
            TrainingFailed: No episode was usable in several batches in a row, or everything was dropped.
        """
        with ended_by_signals(self) as settle, saved_if_it_ends_early(self, settle):
            return run_blocking(self.run())
        raise AssertionError  # the contexts swallow nothing

    async def run(self) -> list[dict[str, float]]:
        """Do what `train` does, on the caller's event loop."""
        config, grpo = self.config, self.grpo
        if grpo.advantage_fn is None:
            refuse_groups_of_one(config)
        history: list[dict[str, float]] = []
        with Journal(grpo, self._callbacks.about) as journal, stop.cancels():
            async with self.rollouts as rollouts:
                at_start = {**self._callbacks.counted(), **await rollouts.sync.follow()}
                if self._scores_start and (scores := await rollouts.evaluate()):
                    self._tell([scores], journal)
                usable = UsableEpisodes(self.world)
                batches = open_batches(rollouts, self.position)
                while grpo.steps_done < config.max_steps:
                    started = time.perf_counter()
                    batch = batches.begin(grpo.steps_done)
                    await batch
                    while batches.refill():
                        await batch
                    waited = time.perf_counter() - started
                    await usable.check(grpo.steps_done + 1, batch.groups)
                    checked = await rollouts.sync.checked()
                    if not (ahead := batches.go_on()):
                        await rollouts.sync.rest()
                    metrics: dict[str, float] = {}
                    train = partial(self._train_on, batch, metrics)
                    try:
                        await beside_the_loop(train) if ahead else train()
                        usable.count(metrics)
                        metrics |= await beside_the_loop(partial(self._ledger.add, self.world, batch.groups))
                        trained = time.perf_counter()
                        await rollouts.sync.bring()
                        self.position = batches.stepped() or self.position
                        evaluates = self._due(config.evaluation.eval_steps)
                        if evaluates or not ahead:  # otherwise the check may take as long as the next batch
                            checked |= await rollouts.sync.checked()
                        metrics |= {
                            "time/wait": waited,
                            "time/wait/groups": waited - metrics["time/wait/staleness"],
                            "time/sync": time.perf_counter() - trained,
                            **self._server_metrics(),
                            "step_time": time.perf_counter() - started,
                        }
                        if evaluates:
                            metrics |= await rollouts.evaluate()
                    finally:
                        if metrics:  # the step is done, also if the run is interrupted after it
                            spent = features_of(self.engine).metrics()
                            history.append(at_start | checked | metrics | spent)
                            self._tell(history, journal)
                    require_agreement(history)
                    if self._due(config.save_steps):
                        await beside_the_loop(self.save_step)
                    at_start = {}
            usable.finish()
        return history

    @property
    def _scores_start(self) -> bool:
        """Whether the held-out tasks are scored before the first step, as step 0."""
        return self.config.evaluation.eval_on_start and not self.steps_done

    def _train_on(self, batch: Batch, metrics: dict[str, float]) -> None:
        """Train on a batch and add the metrics of the step, which an interruption must not lose."""
        metrics |= self.step(batch.groups)
        dismiss_team()  # idle OpenMP threads of the trainer would stall those of the engine
        self.position = batch.trained(self.world.gather)
        metrics |= self.world.merge(batch.metrics)

    def _tell(self, history: list[dict[str, float]], journal: Journal) -> None:
        """Write the metrics of the last step, or the scores before the first, and pass them to the caller."""
        journal.write(history)
        callbacks = self._callbacks
        if self.steps_done and callbacks.on_metrics is not None:
            callbacks.on_metrics(self.steps_done, history[-1])
        elif not self.steps_done and callbacks.on_scored is not None:
            callbacks.on_scored(history[-1])

    def _server_metrics(self) -> dict[str, float]:
        if not features_of(self.engine).servers():
            return {}
        from agentenv.workers.servers import server_metrics  # here, because an engine in process has none

        return server_metrics(self.engine)

    def _due(self, every: int) -> bool:
        """Return whether this step is the last one, or a multiple of `every`, which may be 0."""
        return self.steps_done == self.config.max_steps or (every > 0 and self.steps_done % every == 0)

    def warmup(
        self, demonstrations: Sequence[Trajectory], *, steps: int, **options: Unpack[WarmupOptions]
    ) -> list[dict[str, float]]:
        """Train on demonstrations by cross entropy; return each step's metrics.

        The warm-up has an optimiser of its own; the optimiser of `step` starts afresh afterwards. The first
        step's metrics count the rows that were left out, under `dropped/demonstrations_`.

        Args:
            demonstrations: trajectories whose model spans the model learns to imitate.
            steps: number of optimiser steps.
            options: `batch_size`, `learning_rate` and others; see `WarmupOptions`.
        """
        from agentenv.training.loop.sft import warm_up  # here, because few trainings begin with a warm-up

        model = self.learner.model if isinstance(self.learner, TorchLearner) else None
        options.setdefault("learning_rate", default_rate(self.config, model, warmup=True))
        before = self.weights_version
        try:
            return warm_up(self.grpo, demonstrations, steps=steps, **options)
        finally:
            if self.weights_version != before:  # these weights are no longer those that the run began with
                self._saved_step = -1

    def evaluate(self, temperature: float | None = None) -> dict[str, float]:
        """Play the held-out tasks and return the scores.

        Each task is played once and greedily, unless `eval_temperature` and `num_generations_eval` say
        otherwise.

        Args:
            temperature: sampling temperature; None means `eval_temperature`.

        Returns:
            `eval/success` (share of rewards of at least 1) with `eval/success_low` and `_high` (95 %),
            `eval/reward`, `eval/tasks`; with k episodes of each task also `eval/avg@k`, which equals
            `eval/success`, and `eval/pass@k`; with several environments, these for each of them.
        """
        return run_blocking(self.rollouts.evaluate_alone(temperature))

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint: a plain Hugging Face directory that also holds the trainer's state.

        The tokenizer is yours, or the one beside the model; a model that was passed as an object has none.
        """
        return self._save(Path(path))

    def _save(self, path: Path, *, replica: bool = False) -> Path:
        if self.tokenizer is None and self.model_name:
            with suppress(ModelNotFound):  # a model may lie alone
                self.tokenizer = load_tokenizer(self.model_name)
        loop = {**self.position.record(), "tasks": self._ledger.record()}
        return save_checkpoint(self.grpo, path, tokenizer=self.tokenizer, replica=replica, **loop)

    @property
    def step_path(self) -> Path:
        """Directory of the checkpoint of the last step, whether it exists or not."""
        return Path(self.config.output_dir) / "checkpoints" / f"step-{self.steps_done}"

    def save_step(self, *, replica: bool = False) -> Path:
        """Write `checkpoints/step-N` under `output_dir`, and delete the oldest over `save_total_limit`.

        Args:
            replica: write in this process, because the first one has gone; others must not do so at once.
        """
        directory = self.step_path.parent
        with stop.writing:
            path = self._save(self.step_path, replica=replica)
            self._saved_step = self.steps_done
            if self.world.rank == 0:  # the only process that writes
                prune_checkpoints(directory, self.config.save_total_limit, newest=self.steps_done)
        return path

    @property
    def is_saved(self) -> bool:
        """Whether the weights of the last whole step are saved, or are those that the run began with."""
        return self._saved_step == self.steps_done

    def resume(self, path: str | Path) -> None:
        """Continue from a checkpoint.

        On the CPU a resumed trainer is bit-equal to one that was never stopped: in steps on the same
        episodes, and in whole runs with `old_logprobs="recompute"`.
        """
        with self._held_still():
            state = load_checkpoint(self.grpo, Path(path))
        self.position = TaskPosition.restore(state)
        self._saved_step = self.steps_done
        self._ledger.restore(state.get("tasks", TaskLedger().record()))
        self._rollouts = None  # new ones bring the loaded weights to an engine that has its own copy

    def encoded(self, trajectory: Trajectory) -> Any:
        """Return, once, what a worker made of an episode with `encode`; None if it was played here."""
        crew = None if self._rollouts is None else self._rollouts.crew
        return None if crew is None else crew.encoded(trajectory)

    def _held_still(self) -> AbstractContextManager[None]:
        if self.engine is None or not isinstance(self.learner, TorchLearner):
            return nullcontext()
        return held_still(self.engine, self.learner)

    # Parts of the trainer -------------------------------------------------------------------

    def waiting(self) -> list[Waiting]:
        """Return what the episodes being played wait for; any thread may call this."""
        return [] if self._rollouts is None else self._rollouts.runner.watchdog.waiting()

    @property
    def rollouts(self) -> Rollouts:
        """The part that plays the environments; it is made when it is first needed."""
        if self._rollouts is None:
            if self._mixture is None:
                raise UsageError("there is no environment to play", remedy="pass envs= to GRPOTrainer")
            if isinstance(self.learner, TorchLearner):
                self.engine = open_engine(
                    self.learner,
                    self.engine,
                    model_name=self.model_name,
                    tokenizer=self.renderer.tokenizer,
                    options=self._engine_options,
                )
            assert self.engine is not None  # a learner elsewhere brings its own
            options = self._play_options
            if self.config.workers:
                from agentenv.training.loop.crews import with_crew  # loaded here: few have workers

                options = with_crew(
                    options, self.learner, self._mixture.specs, self.engine, self._engine_options
                )
            self._rollouts = Rollouts(self.grpo, self.engine, self.renderer, self._mixture, options)
        return self._rollouts

    @property
    def renderer(self) -> Renderer:
        """Renderer of the model's chat; without a tokenizer of yours it loads the one beside the model."""
        if self._renderer is None:
            self.tokenizer = self.tokenizer or load_tokenizer(self.model_name)
            self._renderer = Renderer(self.tokenizer)
        return self._renderer

    @property
    def model(self) -> Any:
        """The model in training; the in-process engine samples from the same object.

        Raises:
            UsageError: The model is at a server.
        """
        if not isinstance(self.learner, TorchLearner):
            raise UsageError(f"{self.model_name} is at a server", remedy="`save` downloads its adapter")
        return self.learner.model

    @property
    def world(self) -> World:
        """The processes that train together."""
        return self.learner.world

    @property
    def cursors(self) -> Mapping[str, int]:
        """Number of tasks used so far, by environment; those of a stream may still be played."""
        return self.position.cursors

    @property
    def steps_done(self) -> int:
        """Number of calls of `step` so far."""
        return self.grpo.steps_done

    @property
    def weights_version(self) -> int:
        """Number of times that the weights have changed."""
        return self.learner.weights_version
