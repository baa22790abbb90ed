"""The trainer: groups of trajectories in, better weights out.

One step, as GRPO (DeepSeekMath, section 4.1) with DAPO's changes as defaults:

1. each group's rewards become advantages, groups without spread are left out (`batch`, `advantage`);
2. every trained token gets its weight, over the whole optimiser step (`weighting`);
3. rows are laid out with shared prefixes and scored (`packing`, `policy`, `logprob`);
4. the loss goes backward, gradients are summed in float32, clipped and applied (`loss`, `optim`).

What makes the groups (environments, tools, text) lives in `rollouts` and `loop`; `step` takes any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agentenv.core.errors import UsageError
from agentenv.core.limits import RunLimits
from agentenv.core.seeds import derive_seed
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.render.renderer import Renderer
from agentenv.render.tokenizer import ChatTokenizer
from agentenv.runner.options import RunnerOptions
from agentenv.train.batch import AdvantageFn, Row, TrainBatch, add_demonstrations, build_batch
from agentenv.train.config import GRPOConfig
from agentenv.train.loading import load_model, load_tokenizer
from agentenv.train.loop.checkpoint import load_checkpoint, save_checkpoint, save_numbered
from agentenv.train.loop.loop import run_blocking, train
from agentenv.train.loop.rollouts import Rollouts
from agentenv.train.loop.sync import held_still, on_this_loop
from agentenv.train.model.optim import MasterOptimizer, applies, learning_rate
from agentenv.train.model.policy import Policy, add_lora
from agentenv.train.model.reference import Reference, episode_kl
from agentenv.train.objective.loss import LossInputs
from agentenv.train.update import accumulate, assign_weights, minibatches, score_rows
from agentenv.train.watch.metrics import Meter, episode_metrics, update_metrics
from agentenv.train.watch.notes import episode_notes
from agentenv.train.watch.toptokens import TokenKL, top_tokens
from agentenv.train.world import World, own_device

if TYPE_CHECKING:
    from agentenv.engine.base import Engine

__all__ = ["GRPOTrainer"]

log = logging.getLogger(__name__)


class GRPOTrainer:
    """Trains a causal language model on trajectory groups; see `agentenv.train` for the options.

    Raises:
        ModelNotFound: The model cannot be loaded.
        UsageError: No model is named, or it cannot be trained.
    """

    def __init__(
        self,
        config: GRPOConfig,
        *,
        model: Any = None,
        tokenizer: ChatTokenizer | None = None,
        engine: Engine | None = None,
        envs: Any = None,
        tasks: Any = None,
        eval_tasks: Any = None,
        limits: RunLimits | None = None,
        runner: RunnerOptions | None = None,
        advantage_fn: AdvantageFn | None = None,
        loss_fn: Callable[[LossInputs], torch.Tensor] | None = None,
        on_metrics: Callable[[int, Mapping[str, float]], None] | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
        on_trained: Callable[[Trajectory, Mapping[str, object]], None] | None = None,
    ) -> None:
        source = model if model is not None else config.model
        if isinstance(source, (str, Path)) and not str(source):
            raise UsageError("no model: set GRPOConfig.model to a path or Hub id, or pass model=")
        self.config = config
        self.model_name = str(source) if isinstance(source, (str, Path)) else config.model
        own_device()
        loaded = load_model(str(source), config) if isinstance(source, (str, Path)) else source
        torch.manual_seed(config.seed)
        self.policy = Policy(loaded if config.lora is None else add_lora(loaded, config.lora), config)
        for finding in self.policy.check():
            log.warning("%s", finding)
        self.reference = Reference(self.policy) if config.beta else None  # a sharded model has no copy
        self.policy.shard()
        self.tokenizer, self.engine, self.limits = tokenizer, engine, limits or RunLimits()
        self.runner_options = runner or RunnerOptions()
        self.envs, self.tasks, self.eval_tasks = envs, tasks, eval_tasks
        self.advantage_fn, self.loss_fn = advantage_fn, loss_fn
        self.on_metrics, self.on_trajectory, self.on_trained = on_metrics, on_trajectory, on_trained
        self.steps_done = 0
        """Calls of `step` that were made, also those that had nothing to train on."""
        self.updates_done = 0
        """Optimiser steps applied by `step`."""
        self.tokens_seen = 0
        """Tokens of all episodes so far, prompts and observations included."""
        self.weights_version = 0
        self.cursors: dict[str, int] = {}
        """Tasks trained on so far, by environment."""
        self.top_tokens: list[TokenKL] = []
        """Of the last step, if `top_kl_tokens` asks for them."""
        self._optimizer: MasterOptimizer | None = None
        self._rollouts: Rollouts | None = None
        self._renderer: Renderer | None = None

    @property
    def model(self) -> Any:
        """The model in training; shared with the in-process engine."""
        return self.policy.model

    @property
    def world(self) -> World:
        """The processes that train together."""
        return self.policy.world

    @property
    def optimizer(self) -> MasterOptimizer:
        """The optimiser of `step`, made when first needed: after any warm-up."""
        if self._optimizer is None:
            self._optimizer = MasterOptimizer(self.model.parameters(), self.config)
        return self._optimizer

    def step(
        self, groups: Sequence[TrajectoryGroup], *, demonstrations: Sequence[Trajectory] = ()
    ) -> dict[str, float]:
        """Train on one batch and return its metrics.

        Args:
            groups: the episodes, from any source.
            demonstrations: trained by cross entropy in the same update, weighted by `sft_coef`.

        Raises:
            UsageError: The trajectories were made with another tokenizer.
        """
        started = time.perf_counter()
        played = episode_metrics(groups, weights_version=self.weights_version, gather=self.world.gather)
        batch = self._batch(groups)
        add_demonstrations(batch, demonstrations, self.policy.max_length, self.policy.vocab_size)
        seed = derive_seed(self.config.seed, "minibatches", self.steps_done)
        count = self.config.num_minibatches
        parts = minibatches(batch.rows, groups, count, seed=seed, gather=self.world.gather)
        self._score_before(batch.rows, passes=len(parts) * self.config.num_iterations)
        scored = time.perf_counter()
        meter, updates = Meter(), list[tuple[float, float]]()
        for part in parts * self.config.num_iterations:
            rate = learning_rate(self.config, self.updates_done)
            updates.append(self.update(part, self.optimizer, rate, meter, moved=bool(updates)))
            self.updates_done += applies(updates[-1][1])
        self.steps_done += 1
        self._note(groups, batch)
        metrics = played | batch.metrics | meter.result() | update_metrics(updates)
        metrics |= {
            "learning_rate": learning_rate(self.config, self.updates_done),
            "tokens/trained": float(sum(row.num_trained for row in batch.rows)),
            "weights_version": float(self.weights_version),
            "time/logprob": scored - started,
            "time/update": time.perf_counter() - scored,
        }
        merged = self.world.merge(metrics)
        self.tokens_seen += int(merged.get("tokens/action", 0.0) + merged.get("tokens/context", 0.0))
        return merged | {"num_tokens": float(self.tokens_seen)}

    def _score_before(self, rows: Sequence[Row], *, passes: int) -> None:
        """Score the rows under what stays fixed in this step: the proximal policy and the reference."""
        if self.config.old_logprobs == "recompute" and passes > 1:
            for row, old_n in zip(rows, score_rows(self.policy, rows), strict=True):
                row.old_n = old_n
        if self.reference is not None:
            self.reference.score(rows)

    def _note(self, groups: Sequence[TrajectoryGroup], batch: TrainBatch) -> None:
        """Tell what the update made of each episode, and keep the tokens that it moved most."""
        if self.on_trained is not None:
            for one, note in episode_notes(groups, batch):
                self.on_trained(one, {"step": self.steps_done, **note})
        self.top_tokens = top_tokens(batch.rows, groups, self.config.top_kl_tokens, self.world)

    def warmup(
        self,
        demonstrations: Sequence[Trajectory],
        *,
        steps: int,
        batch_size: int = 8,
        learning_rate: float = 5e-5,
        warmup_steps: int = 4,
        lr_scheduler_type: str = "constant",
        on_metrics: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> list[dict[str, float]]:
        """Train on demonstrations by cross entropy; return each step's metrics.

        The optimiser is its own: the state that `step` uses afterwards starts afresh. The first step's
        metrics count what was left out, under `dropped/demonstrations_`.

        Args:
            demonstrations: trajectories whose model spans are to be imitated, whoever wrote them.
            steps: optimiser steps.
            batch_size: demonstrations of one step, drawn in shuffled rounds.
            learning_rate: its peak.
            warmup_steps: steps of linear rise.
            lr_scheduler_type: `constant`, `linear` or `cosine`.
            on_metrics: called after every step.

        Raises:
            UsageError: No demonstration has anything to train on.
        """
        from agentenv.train.loop.sft import warm_up

        config = replace(
            self.config,
            max_steps=steps,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            lr_scheduler_type=lr_scheduler_type,
        )
        return warm_up(self, demonstrations, config, batch_size=batch_size, on_metrics=on_metrics)

    def train(self) -> list[dict[str, float]]:
        """Play, step, sync, evaluate and save until `max_steps`; return each step's metrics.

        A resumed trainer goes on where its checkpoint was made. The last step's metrics hold the
        evaluation on held-out tasks, if there are any.

        Raises:
            UsageError: There is no environment to play, or nothing to compare in a group of one.
        """
        return run_blocking(on_this_loop(self, train(self)))

    def evaluate(self) -> dict[str, float]:
        """Play the held-out tasks greedily, each once.

        Returns:
            `eval/success` (share of rewards of at least 1) with `eval/success_low` and `_high` (95 %),
            `eval/reward`, `eval/tasks`; per environment if there are several.
        """
        return run_blocking(on_this_loop(self, self.rollouts.evaluate()))

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint: a plain Hugging Face directory with the trainer's state beside it."""
        return save_checkpoint(self, Path(path))

    def save_step(self) -> Path:
        """Write `checkpoints/step-N` under `output_dir` and delete what is over the limit."""
        return save_numbered(self)

    def resume(self, path: str | Path) -> None:
        """Go on from a checkpoint; bit-equal on CPU: steps on the same episodes, runs with "recompute"."""
        with held_still(self):
            load_checkpoint(self, Path(path))
        self._rollouts = None  # an engine with weights of its own has none of these yet

    @property
    def rollouts(self) -> Rollouts:
        """What plays the environments; made when first needed."""
        if self._rollouts is None:
            self._rollouts = Rollouts(self)
        return self._rollouts

    @property
    def renderer(self) -> Renderer:
        """Renderer of the model's chat; its tokenizer lies beside the model if none was given."""
        if self._renderer is None:
            self.tokenizer = self.tokenizer or load_tokenizer(self.model_name)
            self._renderer = Renderer(self.tokenizer)
        return self._renderer

    def count_mixed(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Return how many groups have a gradient."""
        return int(self.world.total(len({row.group for row in self._batch(groups).rows})))

    def _batch(self, groups: Sequence[TrajectoryGroup]) -> TrainBatch:
        ref = self.reference if self.config.kl_in == "reward" else None
        return build_batch(
            groups,
            self.config,
            weights_version=self.weights_version,
            max_length=self.policy.max_length,
            vocab_size=self.policy.vocab_size,
            advantage_fn=self.advantage_fn,
            kl_in_reward=None if ref is None else episode_kl(ref, groups, self.config.kl_estimator),
            gather=self.world.gather,
        )

    def update(
        self, rows: Sequence[Row], optimizer: MasterOptimizer, rate: float, meter: Meter, moved: bool = False
    ) -> tuple[float, float]:
        """Make one optimiser step on the rows; return loss and gradient norm."""
        if not self.world.total(len(rows)):
            return 0.0, 0.0
        optimizer.zero_grad()  # an update that was broken off left some
        assign_weights(rows, self.config, total=self.world.total)
        loss = accumulate(self.policy, rows, meter, loss_fn=self.loss_fn, moved=moved)
        self.world.add_gradients(optimizer)
        with held_still(self):
            norm = optimizer.step(rate)
            self.weights_version += applies(norm)
        return loss, norm
