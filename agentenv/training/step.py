"""GRPO, from groups of episodes to updated weights, to be read from top to bottom.

One step (DeepSeekMath, arXiv 2402.03300, section 4.1, with the defaults of DAPO, arXiv 2503.14476):

1. each group's rewards become advantages, and each sequence a row; groups without spread have no gradient
   and are left out (`batch`, `objective.advantage`);
2. whole groups are dealt out to the optimiser steps of the batch (`minibatches`);
3. the proximal policy and the reference, which stay fixed during the step, score the rows;
4. for each optimiser step every trained token gets one weight, over all rows of all processes
   (`assign_weights`), so that micro-batches, packing and processes cannot change the result;
5. the learner computes the gradient of the loss (`objective.loss`) and applies it.

Nothing here knows an environment, an engine or text, or how the learner lays rows out and where it computes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from random import Random
from typing import Any, Generic, TypeVar

from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.training.batch import (
    Advantage,
    AdvantageFn,
    TrainBatch,
    add_demonstrations,
    build_batch,
    episode_kl,
    once_per_group,
)
from agentenv.training.config import GRPOConfig, refuse_reward_options
from agentenv.training.learners.learner import Learner, LossFn
from agentenv.training.metrics import Meter, Update, episode_metrics, update_metrics
from agentenv.training.objective.weighting import token_weights
from agentenv.training.rows import Row, Scores

__all__ = ["GRPO", "assign_weights", "learning_rate", "minibatches"]

L = TypeVar("L", bound=Learner)


class GRPO(Generic[L]):
    """The algorithm on a learner, with the counters of its progress.

    Args:
        learner: what holds the weights.
        config: the run's options.
        advantage_fn: the user's function for advantages, if any.
        loss_fn: the user's surrogate loss, if any.

    Raises:
        UsageError: An option has no effect with an `advantage_fn`.
    """

    def __init__(
        self,
        learner: L,
        config: GRPOConfig,
        *,
        advantage_fn: AdvantageFn | None = None,
        loss_fn: LossFn | None = None,
    ) -> None:
        if advantage_fn is not None:
            refuse_reward_options(config)
        self.learner, self.config = learner, config
        self.advantage_fn, self.loss_fn = advantage_fn, loss_fn
        # Values of the groups of this step, for which each refill and the step ask.
        self._given_advantages: dict[int, tuple[TrajectoryGroup, Sequence[Advantage]]] = {}
        self._kl: dict[int, tuple[TrajectoryGroup, Sequence[float | None]]] = {}
        self.steps_done = 0
        """Number of batches so far, including those without a trained token."""
        self.updates_done = 0
        """Number of optimiser steps that `step` applied."""
        self.tokens_seen = 0
        """Number of tokens of all episodes so far, including prompts and observations."""

    def step(
        self, groups: Sequence[TrajectoryGroup], demonstrations: Sequence[Trajectory] = (), share: float = 1.0
    ) -> tuple[dict[str, float], TrainBatch]:
        """Train on one batch; return its metrics, merged over all processes, and this one's rows and scores.

        Args:
            groups: the episodes of this process.
            demonstrations: trajectories trained by cross entropy in the same update.
            share: weight of their mean cross entropy beside the policy loss.

        Raises:
            UsageError: The trajectories were made with another tokenizer or at another temperature.
        """
        config, learner, world = self.config, self.learner, self.learner.world
        started = time.perf_counter()
        played = episode_metrics(groups, weights_version=learner.weights_version, gather=world.gather)
        batch = self.batch(groups, demonstrations, share)

        # Minibatches and passes over them. All updates but the first are off-policy by those before them.
        # Rows that only count are dealt out too: they belong to the mean of the minibatch of their group.
        order, number = Random(f"{config.seed} {self.steps_done}"), config.num_minibatches
        parts = minibatches([*batch.rows, *batch.counted], groups, number, order=order, gather=world.gather)
        parts *= config.num_iterations

        # The fixed policies. A step of one update needs no pass for the proximal policy: it is the policy.
        recompute = config.proximal == "recompute" and len(parts) > 1
        old = learner.score(batch.rows) if recompute else ()
        ref = () if learner.reference is None else learner.reference.score(batch.rows)
        fixed = zip_longest(batch.rows, old, ref)
        rows = [*(replace(row, old_n=old_n, ref_n=ref_n) for row, old_n, ref_n in fixed), *batch.counted]
        scored = time.perf_counter()

        # A gradient of 0, or one that is not finite, changes no weight and so counts as no update.
        meter, updates, latest = Meter(), list[Update](), dict[int, Scores]()
        for number, part in enumerate(parts):
            moved = any(update.applied for update in updates)
            share = 1 / len(parts)
            rate = learning_rate(config, self.steps_done + number * share, share)
            updates.append(self.update([rows[index] for index in part], rate, meter, moved=moved))
            latest |= zip(
                (index for index in part if index < len(batch.rows)), updates[-1].scores, strict=True
            )
            self.updates_done += updates[-1].applied
        self.steps_done += 1

        metrics = played | batch.metrics | meter.result() | update_metrics(updates)
        metrics |= {
            "learning_rate": self.learning_rate,
            "tokens/trained": float(sum(row.num_trained for row in batch.rows)),
            "weights_version": float(learner.weights_version),
            "time/logprob": scored - started,
            "time/update": time.perf_counter() - scored,
        }
        merged = world.merge(metrics)
        self.tokens_seen += int(merged.get("tokens/action", 0.0) + merged.get("tokens/context", 0.0))
        batch = replace(batch, scores=[latest.get(index) for index in range(len(batch.rows))])
        return merged | {"num_tokens": float(self.tokens_seen)}, batch

    def update(self, rows: Sequence[Row], rate: float, meter: Meter, *, moved: bool = False) -> Update:
        """Make one optimiser step on these rows.

        Args:
            rows: the rows of one optimiser step, with those that only count in the weights.
            rate: the learning rate.
            meter: collects the sums of the loss's metrics.
            moved: whether an earlier update of the same batch has changed the weights.
        """
        learner = self.learner
        # All processes must come to the same answer, because the gradient is summed over all of them: one
        # without rows of its own still takes part in the sum of the others.
        if not learner.world.total(sum(not row.counted_only for row in rows)):
            return Update(0.0, 0.0, applied=False)
        rows = assign_weights(rows, self.config, total=learner.world.total)
        trained, before = [row for row in rows if not row.counted_only], learner.weights_version
        loss, scores = learner.forward_backward(trained, meter, loss_fn=self.loss_fn, moved=moved)
        return Update(loss, learner.optim_step(rate), learner.weights_version > before, scores)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self.config, self.steps_done)

    # From episodes to rows ----------------------------------------------------------------

    def batch(
        self, groups: Sequence[TrajectoryGroup], shown: Sequence[Trajectory] = (), share: float = 1.0
    ) -> TrainBatch:
        """Return the rows to train on, with their advantages; see `batch.build_batch` and `step`.

        Raises:
            UsageError: The trajectories were made with another tokenizer or at another temperature.
        """
        try:
            batch = self._build(groups)
        finally:
            self._given_advantages.clear()
            self._kl.clear()
        return add_demonstrations(batch, shown, self.learner.max_length, self.learner.vocab_size, share)

    def _build(self, groups: Sequence[TrajectoryGroup]) -> TrainBatch:
        """Return the rows of groups, of which some may have been passed for this step before."""
        reference = self.learner.reference if self.config.loss.kl_in == "reward" else None
        own, total = self.advantage_fn, self.learner.world.total
        bounds: dict[str, Any] = {
            "max_length": self.learner.max_length,
            "vocab_size": self.learner.vocab_size,
        }
        kl = None
        if reference is not None:
            kl = once_per_group(
                self._kl, groups, lambda new: episode_kl(reference, new, self.config, **bounds), total
            )
        return build_batch(
            groups,
            self.config,
            **bounds,
            advantage_fn=own and (lambda groups: once_per_group(self._given_advantages, groups, own, total)),
            kl_in_reward=kl,
            gather=self.learner.world.gather,
        )

    def count_mixed(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Return how many groups of all processes have a gradient from the environment's own rewards.

        Advantages of the user's function, and the KL in the reward, are kept for the step's own `batch`.
        """
        batch = self._build(groups)
        mixed = {row.group for row in batch.rows if row.advantages_n.any() and batch.mixed[row.group]}
        return int(self.learner.world.total(len(mixed)))

    # For checkpoints ----------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return the counters that describe the progress of the training."""
        return {
            "steps_done": self.steps_done,
            "updates_done": self.updates_done,
            "tokens_seen": self.tokens_seen,
            "weights_version": self.learner.weights_version,
        }

    def restore(self, counters: Mapping[str, int]) -> None:
        """Set the counters to what `counters` returned in an earlier process."""
        self.steps_done = counters["steps_done"]
        self.updates_done = counters["updates_done"]
        self.tokens_seen = counters["tokens_seen"]
        self.learner.weights_version = counters["weights_version"]


def learning_rate(config: GRPOConfig, steps_done: float, share: float = 1.0) -> float:
    """Return the learning rate of an optimiser step.

    The schedule counts training steps, because a step makes fewer updates than planned where it has few
    groups, and none where no group has a gradient.

    Args:
        config: the run's options.
        steps_done: number of steps before this update, with the part of its own step that is done.
        share: the update's share of its step.
    """
    schedule, warmup_steps = config.optimizer.lr_scheduler_type, config.optimizer.warmup_steps
    if steps_done < warmup_steps:
        return config.base_rate * (steps_done + share) / warmup_steps
    done = (steps_done - warmup_steps) / max(1, config.max_steps - warmup_steps)
    if schedule == "linear":
        return config.base_rate * max(0.0, 1.0 - done)
    if schedule == "cosine":
        return config.base_rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return config.base_rate


def assign_weights(
    rows: Sequence[Row], config: GRPOConfig, total: Callable[[float], float] = float
) -> list[Row]:
    """Return rows with their token weight, normalised over all rows of an optimiser step on all ranks."""
    policy = [row for row in rows if not row.demonstration]
    of_policy = token_weights(
        [row.num_trained for row in policy],
        reduction=config.loss.scheme,
        episodes=[row.episode for row in policy],
        groups=[row.group for row in policy],
        max_tokens=config.loss.max_completion_length,
        total=total,
    )
    shown = [row for row in rows if row.demonstration]
    of_shown = token_weights([row.num_trained for row in shown], reduction="token_mean", total=total)
    weights = dict(zip(policy, of_policy, strict=True))
    weights |= {row: row.weight * weight for row, weight in zip(shown, of_shown, strict=True)}
    return [replace(row, weight=weights[row]) for row in rows]


def minibatches(
    rows: Sequence[Row],
    groups: Sequence[TrajectoryGroup],
    count: int,
    *,
    order: Random,
    gather: Callable[[Sequence[str]], Sequence[str]] = list,
) -> list[list[int]]:
    """Assign whole groups to optimiser steps, in a random order; return the indices of each step's rows.

    The groups of all processes are ordered together, so that the result does not depend on which process
    holds which group. Demonstrations count as one group.

    Args:
        rows: rows to assign, each with its group's index in `Row.group`.
        groups: the groups that the rows come from.
        count: number of optimiser steps; there are fewer if there are fewer groups.
        order: draws the order, the same in all processes.
        gather: returns the values of all processes.
    """
    names = [groups[row.group].group_id if row.group >= 0 else "" for row in rows]
    drawn = sorted(set(gather(sorted(set(names)))))
    order.shuffle(drawn)
    part = {name: index % count for index, name in enumerate(drawn)}
    return [
        [index for index, name in enumerate(names) if part[name] == number]
        for number in range(min(count, len(drawn)))
    ]
