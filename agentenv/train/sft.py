"""Supervised warm-up: demonstrations that come through the same trajectory path as everything else.

A scripted policy plays the environment through the runner; its completions are model spans, and the
warm-up raises their log-probability. Reinforcement learning then selects among what was shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from agentenv.errors import UsageError
from agentenv.seeding import derive_seed
from agentenv.train.batch import demonstration_rows
from agentenv.train.metrics import Meter
from agentenv.train.optim import MasterOptimizer, learning_rate
from agentenv.trajectory import Trajectory

if TYPE_CHECKING:
    from agentenv.train.grpo import GRPOTrainer

__all__ = ["warm_up"]


def warm_up(
    trainer: GRPOTrainer,
    demonstrations: Sequence[Trajectory],
    *,
    on_metrics: Callable[[int, Mapping[str, float]], None] | None = None,
    steps: int,
    batch_size: int,
    **schedule: Any,
) -> list[dict[str, float]]:
    """Do what `GRPOTrainer.warmup` says."""
    rows = demonstration_rows(demonstrations, max_length=trainer.policy.max_length)
    if not rows:
        raise UsageError(
            f"none of {len(demonstrations)} demonstrations has a sampled token to train on; "
            "were they played by an engine that only speaks text?"
        )
    config = replace(trainer.config, max_steps=steps, **schedule)
    optimizer = MasterOptimizer(trainer.model.parameters(), config)
    random = Random(derive_seed(config.seed, "warmup"))
    queue: list[int] = []
    history: list[dict[str, float]] = []
    for step in range(steps):
        started = time.perf_counter()
        while len(queue) < batch_size:
            queue += random.sample(range(len(rows)), len(rows))
        chosen, queue = queue[:batch_size], queue[batch_size:]
        meter = Meter()
        _, norm = trainer.update(
            [rows[number] for number in chosen], optimizer, learning_rate(config, step), meter
        )
        metrics = {"sft/nll": meter.result()["sft/nll"], "grad_norm": norm}
        metrics["time/update"] = time.perf_counter() - started
        history.append(metrics)
        if on_metrics is not None:
            on_metrics(step + 1, metrics)
    optimizer.close()
    return history
