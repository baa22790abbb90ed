"""Supervised warm-up: demonstrations that come through the same trajectory path as everything else.

A scripted policy plays the environment through the runner; its completions are model spans, and the
warm-up raises their log-probability. Reinforcement learning then selects among what was shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from agentenv.core.context import Context
from agentenv.core.episode_env import Action, EpisodeEnv, Outcome, ResetResult, StepResult
from agentenv.core.errors import UsageError
from agentenv.core.limits import RunLimits
from agentenv.core.messages import JsonValue, Message
from agentenv.core.seeds import derive_seed
from agentenv.core.task import Task
from agentenv.core.trajectory import Trajectory
from agentenv.engine.scripted.scripted import ScriptedEngine
from agentenv.envs.spec import EnvSpec
from agentenv.render.renderer import Renderer
from agentenv.runner.runner import Runner
from agentenv.train.batch import TrainBatch, add_demonstrations
from agentenv.train.config import GRPOConfig
from agentenv.train.loop.loop import run_blocking
from agentenv.train.model.optim import MasterOptimizer, learning_rate
from agentenv.train.watch.metrics import Meter

if TYPE_CHECKING:
    from agentenv.train.trainer import GRPOTrainer

__all__ = ["DemonstrationPolicy", "demonstrate", "warm_up"]

DemonstrationPolicy: TypeAlias = Callable[[Sequence[Message], Mapping[str, object], Random], Message]
"""Messages so far, the task's fields and random numbers of the episode: the next assistant message."""


def demonstrate(
    spec: EnvSpec,
    tasks: Iterable[Task | Mapping[str, object]],
    policy: DemonstrationPolicy,
    renderer: Renderer,
    *,
    limits: RunLimits | None = None,
    seed: int = 0,
) -> list[Trajectory]:
    """Let a scripted policy play each task once, through the runner, and return the trajectories.

    Args:
        spec: the environment.
        tasks: what to show.
        policy: writes the assistant's messages; its random numbers follow from seed and task.
        renderer: of the model that will be trained.
        limits: of the episodes.
        seed: of the run.
    """
    return run_blocking(_demonstrate(spec, tasks, policy, renderer, limits or RunLimits(), seed))


async def _demonstrate(  # noqa: PLR0917 - the parameters of `demonstrate`
    spec: EnvSpec,
    tasks: Iterable[Task | Mapping[str, object]],
    policy: DemonstrationPolicy,
    renderer: Renderer,
    limits: RunLimits,
    seed: int,
) -> list[Trajectory]:
    shown: list[Trajectory] = []
    for number, task in enumerate(tasks):
        env = _Watched(spec.make())
        random = Random(derive_seed(seed, "demonstration", spec.id, number))

        def play(_: object, env: _Watched = env, random: Random = random) -> Message:
            return policy(env.messages, env.task, random)

        engine = ScriptedEngine(play, tokenizer=renderer.tokenizer)  # pyright: ignore[reportArgumentType]
        runner = Runner(engine, renderer, limits, run_seed=seed)
        shown.append(await runner.run_episode(env, task, env_id=spec.id, limits=spec.limits))
    return shown


class _Watched:
    """An environment that keeps the messages it handed out, for the policy that plays it."""

    def __init__(self, env: EpisodeEnv) -> None:
        self._env = env
        self.ends_on_text = env.ends_on_text
        self.messages: list[Message] = []
        self.task: Mapping[str, object] = {}

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, JsonValue]]:
        return self._env.tool_schemas

    async def begin(self, task: Mapping[str, object], *, seed: int, context: Context) -> ResetResult:
        reset = await self._env.begin(task, seed=seed, context=context)
        self.task = task
        self.messages = list(reset.messages)
        return reset

    async def advance(self, action: Action) -> StepResult:
        step = await self._env.advance(action)
        self.messages += [
            action.to_message(),
            *(result.to_message() for result in step.tool_results),
            *step.messages,
        ]
        return step

    async def is_finished(self) -> bool:
        return await self._env.is_finished()

    async def end(self, stop_reason: str) -> Outcome:
        return await self._env.end(stop_reason)

    async def shutdown(self) -> None:
        await self._env.shutdown()


def warm_up(
    trainer: GRPOTrainer,
    demonstrations: Sequence[Trajectory],
    config: GRPOConfig,
    *,
    batch_size: int,
    on_metrics: Callable[[int, Mapping[str, float]], None] | None = None,
) -> list[dict[str, float]]:
    """Do what `GRPOTrainer.warmup` says, with the steps and the schedule of a configuration."""
    shown = TrainBatch([])
    add_demonstrations(shown, demonstrations, trainer.policy.max_length, trainer.policy.vocab_size)
    rows = shown.rows
    if not rows:
        too_long = shown.metrics.get("dropped/demonstrations_too_long", 0.0)
        raise UsageError(
            f"none of {len(demonstrations)} demonstrations can be trained on: {too_long:.0f} are longer than "
            f"the {trainer.policy.max_length} tokens that the model takes, the others have no sampled token; "
            "were they played by an engine that only speaks text?"
        )
    config = replace(config, num_minibatches=1, num_iterations=1)  # one update a step
    random = Random(derive_seed(config.seed, "warmup"))
    queue: list[int] = []
    history: list[dict[str, float]] = []
    # Closed also when it is broken off: it would go on taking the gradients from the next optimiser.
    with closing(MasterOptimizer(trainer.model.parameters(), config)) as optimizer:
        for step in range(config.max_steps):
            started = time.perf_counter()
            while len(queue) < batch_size:
                queue += random.sample(range(len(rows)), len(rows))
            chosen, queue = queue[:batch_size], queue[batch_size:]
            meter = Meter()
            rate = learning_rate(config, step)
            _, norm = trainer.update([rows[number] for number in chosen], optimizer, rate, meter)
            metrics = {"sft/nll": meter.result()["sft/nll"], "grad_norm": norm}
            metrics["time/update"] = time.perf_counter() - started
            if not history:
                metrics |= shown.metrics
            history.append(metrics)
            if on_metrics is not None:
                on_metrics(step + 1, metrics)
    return history
