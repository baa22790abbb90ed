"""The trainer: groups of trajectories in, better weights out.

One step, as GRPO (DeepSeekMath, section 4.1) with DAPO's changes as defaults:

1. each group's rewards become advantages, groups without spread are left out (`batch`, `advantage`);
2. every trained token gets its weight, over the whole optimiser step (`weighting`);
3. rows are laid out with shared prefixes and scored (`packing`, `policy`, `logprob`);
4. the loss goes backward, gradients are summed in float32, clipped and applied (`loss`, `optim`).

What makes the groups (environments, tools, text) lives in `agentenv.train.loop`, and this module
works without it: `step` takes trajectories from any source.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from agentenv.errors import UsageError
from agentenv.limits import RunLimits
from agentenv.render import ChatTokenizer, Renderer
from agentenv.seeding import derive_seed
from agentenv.train.batch import AdvantageFn, Row, TrainBatch, build_batch, demonstration_rows
from agentenv.train.checkpoint import load_checkpoint, save_checkpoint, save_numbered
from agentenv.train.config import GRPOConfig
from agentenv.train.distributed import World
from agentenv.train.loop import Rollouts, run_blocking, train
from agentenv.train.loss import LossInputs
from agentenv.train.metrics import Meter, episode_metrics
from agentenv.train.notes import episode_notes
from agentenv.train.optim import MasterOptimizer, learning_rate
from agentenv.train.policy import Policy, add_lora, load_model, load_tokenizer
from agentenv.train.reference import Reference, episode_kl
from agentenv.train.sync import held_still
from agentenv.train.update import accumulate, assign_weights, score_rows
from agentenv.trajectory import Trajectory, TrajectoryGroup

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
        loaded = load_model(str(source), config) if isinstance(source, (str, Path)) else source
        torch.manual_seed(config.seed)
        self.policy = Policy(loaded if config.lora is None else add_lora(loaded, config.lora), config)
        for finding in self.policy.check():
            log.warning("%s", finding)
        if config.fsdp and self.world.size > 1:
            self.policy.shard()
        self.reference = Reference(self.policy) if config.beta else None
        self.tokenizer, self.engine, self.limits = tokenizer, engine, limits or RunLimits()
        self.envs, self.tasks, self.eval_tasks = envs, tasks, eval_tasks
        self.advantage_fn, self.loss_fn = advantage_fn, loss_fn
        self.on_metrics, self.on_trajectory, self.on_trained = on_metrics, on_trajectory, on_trained
        self.steps_done = 0
        """Calls of `step` that were made, also those that had nothing to train on."""
        self.updates_done = 0
        """Optimiser steps applied by `step`."""
        self.weights_version = 0
        self.cursors: dict[str, int] = {}
        """Tasks taken so far, by environment."""
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
        batch = self._batch(groups)
        batch.rows += demonstration_rows(demonstrations, max_length=self.policy.max_length)
        meter = Meter()
        norms: list[float] = []
        losses: list[float] = []
        parts = self._minibatches(batch.rows)
        if self.config.old_logprobs == "recompute" and len(parts) * self.config.num_iterations > 1:
            for row, old_n in zip(batch.rows, score_rows(self.policy, batch.rows), strict=True):
                row.old_n = old_n
        if self.reference is not None:
            self.reference.score(batch.rows)
        for _ in range(self.config.num_iterations):
            for rows in parts:
                rate = learning_rate(self.config, self.updates_done, total_steps=self._total_updates(parts))
                loss, norm = self.update(rows, self.optimizer, rate, meter)
                losses.append(loss)
                norms.append(norm)
                self.updates_done += isfinite(norm)
        self.steps_done += 1
        if self.on_trained is not None:
            for one, note in episode_notes(groups, batch):
                self.on_trained(one, {"step": self.steps_done, **note})
        metrics = episode_metrics(groups) | batch.metrics | meter.result()
        metrics |= {
            "loss": sum(losses) / len(losses) if losses else 0.0,
            "grad_norm": sum(norms) / len(norms) if norms else 0.0,
            "learning_rate": learning_rate(self.config, self.updates_done),
            "updates": float(sum(map(isfinite, norms))),
            "updates/not_finite": float(sum(not isfinite(norm) for norm in norms)),
            "tokens/trained": float(sum(row.num_trained for row in batch.rows)),
            "weights_version": float(self.weights_version),
            "time/update": time.perf_counter() - started,
        }
        return self.world.merge(metrics)

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

        The optimiser is its own: the state that `step` uses afterwards starts afresh.

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
        from agentenv.train.sft import warm_up

        schedule = {"warmup_steps": warmup_steps, "lr_scheduler_type": lr_scheduler_type}
        return warm_up(
            self,
            demonstrations,
            on_metrics=on_metrics,
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            **schedule,
        )

    def train(self) -> list[dict[str, float]]:
        """Play, step, sync, evaluate and save until `max_steps`; return each step's metrics.

        A resumed trainer goes on where its checkpoint was made. The last step's metrics hold the
        evaluation on held-out tasks, if there are any.

        Raises:
            UsageError: There is no environment to play.
        """
        return run_blocking(train(self))

    def evaluate(self) -> dict[str, float]:
        """Play the held-out tasks greedily, each once.

        Returns:
            `eval/success` (share of rewards of at least 1) with `eval/success_low` and `_high` (95 %),
            `eval/reward`, `eval/tasks`; per environment if there are several.
        """
        return run_blocking(self.rollouts.evaluate())

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint: a plain Hugging Face directory with the trainer's state beside it."""
        return save_checkpoint(self, Path(path))

    def save_step(self) -> Path:
        """Write `checkpoints/step-N` under `output_dir` and delete what is over the limit."""
        return save_numbered(self)

    def resume(self, path: str | Path) -> None:
        """Go on from a checkpoint, bit-equal on CPU."""
        with held_still(self):
            load_checkpoint(self, Path(path))

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
        return build_batch(
            groups,
            self.config,
            weights_version=self.weights_version,
            max_length=self.policy.max_length,
            vocab_size=self.policy.vocab_size,
            advantage_fn=self.advantage_fn,
            kl_in_reward=self._kl_in_reward(groups),
        )

    def _kl_in_reward(self, groups: Sequence[TrajectoryGroup]) -> Callable[[Trajectory], float] | None:
        if self.reference is None or self.config.kl_in != "reward":
            return None
        return episode_kl(self.reference, groups, self.config.kl_estimator)

    def _minibatches(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Deal the groups out to the optimiser steps, whole and in an order drawn from the seed."""
        groups: dict[int, list[Row]] = {}
        for row in rows:
            groups.setdefault(row.group, []).append(row)
        order = list(groups.values())
        count = self.world.most(min(self.config.num_minibatches, len(order)))
        if count > 1:
            Random(derive_seed(self.config.seed, "minibatches", self.steps_done)).shuffle(order)
        return [[row for group in order[start::count] for row in group] for start in range(count)]

    def _total_updates(self, parts: Sequence[object]) -> int:
        return self.config.max_steps * self.config.num_iterations * max(1, len(parts))

    def update(
        self, rows: Sequence[Row], optimizer: MasterOptimizer, rate: float, meter: Meter
    ) -> tuple[float, float]:
        """Make one optimiser step on the rows; return loss and gradient norm."""
        if not self.world.total(len(rows)):
            return 0.0, 0.0
        assign_weights(rows, self.config, total=self.world.total)
        loss = accumulate(self.policy, rows, meter, loss_fn=self.loss_fn)
        self.world.add_gradients(optimizer)
        with held_still(self):
            norm = optimizer.step(rate)
            self.weights_version += isfinite(norm)
        return loss, norm
