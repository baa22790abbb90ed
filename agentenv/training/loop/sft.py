"""Supervised warm-up on demonstrations, which are ordinary trajectories.

A scripted policy plays the environment through the runner. Its completions are model spans, and the warm-up
raises their log-probability. Reinforcement learning then reinforces the better ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any, Literal, TypeAlias, TypedDict

from agentenv.core.episode_env import Task, derive_seed
from agentenv.core.errors import UsageError
from agentenv.core.limits import RunLimits
from agentenv.core.loops import run_blocking
from agentenv.core.messages import text_of
from agentenv.core.playing import MessagePolicy
from agentenv.core.trajectory import Trajectory
from agentenv.core.visible import logger
from agentenv.envs.spec import EnvSpec
from agentenv.render.renderer import Renderer
from agentenv.runner.runner import Runner
from agentenv.training.batch import TrainBatch, add_demonstrations
from agentenv.training.learners.learner import Learner
from agentenv.training.metrics import Meter
from agentenv.training.rows import Row
from agentenv.training.step import GRPO
from agentenv.training.step import learning_rate as scheduled_rate
from agentenv.training.stop import stop

__all__ = [
    "DemonstrationPolicy",
    "WarmupOptions",
    "demonstrate",
    "require_full_marks",
    "sort_out",
    "warm_up",
]

log = logger(__name__)

HARDLY = 0.75
"""Share of the nats before, below which those of steps that have learned fall."""
WELL = 0.3
"""Nats a token with which a model imitates well, however well it did at first."""
LEARNED = 0.1
"""Nats of a whole demonstration with which nine of ten would be sampled as they were shown."""

DemonstrationPolicy: TypeAlias = MessagePolicy
"""Function of the messages so far, the task's fields and the episode's random generator, which returns
the next assistant message."""


def sort_out(
    shown: Sequence[Trajectory], min_reward: float | None = None
) -> tuple[list[Trajectory], dict[str, int]]:
    """Return the demonstrations to imitate, and the numbers of the others by the reason to leave them out.

    Args:
        shown: the demonstrations. Left out are failed ones, such as those whose calls would be read as
            something else or stand in the text, where nothing reads them, and those that a limit cut.
        min_reward: least reward of a demonstration; None takes any.
    """
    good: list[Trajectory] = []
    others: Counter[str] = Counter()
    for trajectory in shown:
        if trajectory.stop_reason.failed:
            error = trajectory.error
            others[f"failed ({trajectory.stop_reason if error is None else error.message})"] += 1
        elif trajectory.truncated:
            others[f"cut by a limit ({trajectory.stop_reason.value})"] += 1
        elif min_reward is not None and (trajectory.reward is None or trajectory.reward < min_reward):
            others[f"reward under {min_reward:g}"] += 1
        else:
            good.append(trajectory)
    return good, dict(others)


def require_full_marks(shown: Sequence[Trajectory], full_marks: float) -> None:
    """Refuse an oracle's demonstrations if one that came to its end earned less than the full marks.

    Raises:
        UsageError: The message holds the first such episode.
    """
    whole = [each for each in shown if not each.stop_reason.failed and not each.truncated]
    poor = [each for each in whole if each.reward is None or each.reward < full_marks - 1e-6]
    if not poor:
        return
    last = poor[0].messages[-4:]
    said = [f"{message['role']}: {text_of(message) or message.get('tool_calls', '')}" for message in last]
    error = UsageError(
        f"the oracle of {poor[0].env_id} earned {poor[0].reward} of {full_marks:g} on task "
        f"{poor[0].task_id}, and less than full marks in {len(poor)} of {len(whole)} demonstrations",
        remedy="correct the oracle (`agentenv check` plays it), name the least reward to imitate with "
        "train.demo_min_reward, or begin without demonstrations: demos none",
    )
    error.add_note(" | ".join(text[:200] for text in said))
    raise error


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

    The simulated user of the specification takes part. The ids of the groups begin with `demonstration:`.

    Args:
        spec: the environment.
        tasks: the tasks to play.
        policy: function that writes the assistant's messages; its random numbers are derived from the
            seed and the task.
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
    from agentenv.engine.scripted.policy import PolicyEngine

    engine = PolicyEngine(policy, renderer.tokenizer, name="demonstration", seed=seed)  # pyright: ignore[reportArgumentType]
    runner = Runner(engine, renderer, limits, run_seed=seed)
    todo = list(tasks)
    with stop.cancels():
        shown = [group async for group in runner.run_groups(spec, todo)]
    order = {job.group_id: place for place, job in enumerate(runner.stage(spec).jobs(todo))}
    shown.sort(key=lambda group: order[group.group_id])
    return [
        replace(trajectory, group_id=f"demonstration:{trajectory.group_id}")
        for group in shown
        for trajectory in group
    ]


class WarmupOptions(TypedDict, total=False):
    """Options of a warm-up, with their defaults."""

    max_steps: int
    """Number of steps up to which the warm-up goes on, in rounds of `steps`, until it has learned or a round
    hardly lowers the nats; default `steps`."""
    batch_size: int
    """Number of rows per step, drawn in shuffled rounds; default 8."""
    learning_rate: float
    """Peak of the learning rate; by default by the model's width and for LoRA, see `training.rate`."""
    warmup_steps: int
    """Number of steps in which the learning rate rises linearly; default 4."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    on_metrics: Callable[[int, Mapping[str, float]], None] | None
    """Called after every step."""


def warm_up(
    grpo: GRPO[Any],
    demonstrations: Sequence[Trajectory],
    *,
    steps: int,
    max_steps: int = 0,
    batch_size: int = 8,
    learning_rate: float,
    warmup_steps: int = 4,
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant",
    on_metrics: Callable[[int, Mapping[str, float]], None] | None = None,
) -> list[dict[str, float]]:
    """Train on demonstrations by cross entropy; see `GRPOTrainer.warmup`.

    Raises:
        UsageError: No demonstration has anything to train on.
    """
    max_steps = max(steps, max_steps)
    config = replace(
        grpo.config,
        max_steps=max_steps,
        learning_rate=learning_rate,
        warmup_steps=min(warmup_steps, steps),
        lr_scheduler_type=lr_scheduler_type,
        num_minibatches=1,  # one update a step
        num_iterations=1,
    )
    rows, dropped = _rows_of(demonstrations, grpo.learner)
    tokens = sum(len(row.positions_n) for row in rows) / len(rows)
    half = -(-len(rows) // (2 * batch_size))
    random = Random(derive_seed(config.seed, "warmup"))
    queue: list[int] = []
    history: list[dict[str, float]] = []
    log.info("warm-up step %d of %d", 0, steps)
    with grpo.learner.separate_optimizer(config):
        for step in range(max_steps):
            stop.before_step()
            started = time.perf_counter()
            while len(queue) < batch_size:
                queue += random.sample(range(len(rows)), len(rows))
            chosen, queue = queue[:batch_size], queue[batch_size:]
            meter = Meter()
            rate = scheduled_rate(config, step)
            norm = grpo.update([rows[number] for number in chosen], rate, meter).norm
            metrics = {"sft/nll": meter.result()["sft/nll"], **({} if norm is None else {"grad_norm": norm})}
            metrics["time/update"] = time.perf_counter() - started
            history.append(metrics if step else metrics | dropped)
            end = steps * (step // steps + 1)
            log.info("warm-up step %d of %d: %.2f nats a token", step + 1, end, metrics["sft/nll"])
            if on_metrics is not None:
                on_metrics(step + 1, history[-1])
            nats = [each["sft/nll"] * tokens for each in history]
            if step + 1 >= steps and grpo.learner.world.gather([_is_enough(nats, steps, half)])[0]:
                break
    _tell_if_it_hardly_learned([metrics["sft/nll"] for metrics in history], learning_rate)
    return history


def _is_enough(nats: Sequence[float], steps: int, recent: int) -> bool:
    """Return whether demonstrations are learned, or a round of steps hardly lowered their nats.

    Args:
        nats: of a whole demonstration, in each step so far.
        steps: number of steps of a round.
        recent: number of last steps that tell whether they are learned.
    """
    if fmean(nats[-recent:]) < LEARNED:
        return True
    half = -(-steps // 2)
    before = nats[-steps - half : -steps] or nats[:1]
    return len(nats) % steps == 0 and fmean(nats[-half:]) > HARDLY * fmean(before)


def _tell_if_it_hardly_learned(nats: Sequence[float], rate: float) -> None:
    if len(nats) > 1 and not nats[-1] < max(WELL, nats[0] * HARDLY):
        log.warning(
            "the warm-up has hardly learned: %.2f nats a token at first, %.2f at last, at a learning rate of "
            "%.2g; show each demonstration more often (num_demos), or call warmup with a higher rate",
            nats[0],
            nats[-1],
            rate,
        )


def _rows_of(
    demonstrations: Sequence[Trajectory], learner: Learner
) -> tuple[Sequence[Row], dict[str, float]]:
    """Return the rows of demonstrations, and metrics that count what was left out."""
    longest = learner.max_length
    shown = add_demonstrations(TrainBatch(), demonstrations, longest, learner.vocab_size)
    if not shown.rows:
        too_long = shown.metrics.get("dropped/demonstrations_too_long", 0.0)
        raise UsageError(
            f"none of {len(demonstrations)} demonstrations can be trained on: {too_long:.0f} are longer than "
            f"the {longest} tokens that the model takes, the others have no sampled token",
            remedy="play them with an engine that returns token ids, as `demonstrate` does",
        )
    return shown.rows, shown.metrics
