"""Supervised warm-up on demonstrations, which are ordinary trajectories.

A scripted policy plays the environment through the runner. Its completions are model spans, and the warm-up
raises their log-probability. Reinforcement learning then reinforces the better ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Literal, TypeAlias, TypedDict

from agentenv.core.context import Context
from agentenv.core.episode_env import Action, EpisodeEnv, Outcome, ResetResult, StepResult
from agentenv.core.errors import UsageError
from agentenv.core.imports import import_object
from agentenv.core.limits import RunLimits
from agentenv.core.messages import JsonValue, Message
from agentenv.core.seeds import derive_seed
from agentenv.core.task import Task
from agentenv.core.threads import run_blocking
from agentenv.core.trajectory import Trajectory
from agentenv.engine.scripted.scripted import ScriptedEngine
from agentenv.envs.spec import EnvSpec
from agentenv.render.renderer import Renderer
from agentenv.runner.runner import Runner
from agentenv.train.batch import Row, TrainBatch, add_demonstrations
from agentenv.train.learner import Learner
from agentenv.train.model.optim import learning_rate as scheduled_rate
from agentenv.train.sums import Meter

__all__ = ["DemonstrationPolicy", "WarmupOptions", "demonstrate", "policy_of", "warm_up"]

DemonstrationPolicy: TypeAlias = Callable[[Sequence[Message], Mapping[str, object], Random], Message]
"""Function of the messages so far, the task's fields and the episode's random generator, which returns
the next assistant message."""


def policy_of(demos: DemonstrationPolicy | str) -> tuple[DemonstrationPolicy | None, str]:
    """Return a scripted policy and its name; None and an empty name if `demos` is empty.

    Args:
        demos: the policy, or its import path `module:function`.

    Raises:
        UsageError: The policy cannot be imported.
    """
    if not isinstance(demos, str):
        return demos, f"{demos.__module__}:{getattr(demos, '__qualname__', type(demos).__qualname__)}"
    if not demos:
        return None, ""
    return import_object(demos, where="demos"), demos


def demonstrate(
    spec: EnvSpec,
    tasks: Iterable[Task | Mapping[str, object]],
    policy: DemonstrationPolicy,
    renderer: Renderer,
    *,
    limits: RunLimits | None = None,
    seed: int = 0,
) -> list[Trajectory]:
    """Play each task once with a scripted policy, through the runner, and return the trajectories.

    Args:
        spec: the environment.
        tasks: the tasks to play.
        policy: function that writes the assistant's messages; its random numbers are derived from the
            seed and the index of the task.
        renderer: renderer of the model that will be trained.
        limits: limits of the episodes.
        seed: seed of the run.
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
    """An environment that records its messages, so that the scripted policy can read them."""

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


class WarmupOptions(TypedDict, total=False):
    """Options of a warm-up, with their defaults."""

    batch_size: int
    """Number of rows per step, drawn in shuffled rounds; default 8."""
    learning_rate: float
    """Peak of the learning rate; default 5e-5."""
    warmup_steps: int
    """Number of steps in which the learning rate rises linearly; default 4."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    on_metrics: Callable[[int, Mapping[str, float]], None] | None
    """Called after every step."""


def warm_up(
    learner: Learner,
    demonstrations: Sequence[Trajectory],
    *,
    steps: int,
    batch_size: int = 8,
    learning_rate: float = 5e-5,
    warmup_steps: int = 4,
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant",
    on_metrics: Callable[[int, Mapping[str, float]], None] | None = None,
) -> list[dict[str, float]]:
    """Train on demonstrations by cross entropy; see `GRPOTrainer.warmup`.

    Raises:
        UsageError: No demonstration has anything to train on.
    """
    config = replace(
        learner.config,
        max_steps=steps,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        lr_scheduler_type=lr_scheduler_type,
        num_minibatches=1,  # one update a step
        num_iterations=1,
    )
    rows, dropped = _rows_of(demonstrations, learner)
    random = Random(derive_seed(config.seed, "warmup"))
    queue: list[int] = []
    history: list[dict[str, float]] = []
    with learner.separate_optimizer(config) as optimizer:
        for step in range(steps):
            started = time.perf_counter()
            while len(queue) < batch_size:
                queue += random.sample(range(len(rows)), len(rows))
            chosen, queue = queue[:batch_size], queue[batch_size:]
            meter = Meter()
            rate = scheduled_rate(config, step)
            _, norm = learner.apply([rows[number] for number in chosen], optimizer, rate, meter)
            metrics = {"sft/nll": meter.result()["sft/nll"], "grad_norm": norm}
            metrics["time/update"] = time.perf_counter() - started
            history.append(metrics if step else metrics | dropped)
            if on_metrics is not None:
                on_metrics(step + 1, history[-1])
    return history


def _rows_of(demonstrations: Sequence[Trajectory], learner: Learner) -> tuple[list[Row], dict[str, float]]:
    """Return the rows of demonstrations, and metrics that count what was left out."""
    longest = learner.policy.max_length
    shown = TrainBatch([])
    add_demonstrations(shown, demonstrations, longest, learner.policy.vocab_size)
    if not shown.rows:
        too_long = shown.metrics.get("dropped/demonstrations_too_long", 0.0)
        raise UsageError(
            f"none of {len(demonstrations)} demonstrations can be trained on: {too_long:.0f} are longer than "
            f"the {longest} tokens that the model takes, the others have no sampled token",
            remedy="play them with an engine that returns token ids, as `demonstrate` does",
        )
    return shown.rows, shown.metrics
