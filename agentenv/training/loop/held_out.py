"""Play the held-out tasks of a training, and score them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from agentenv.core.trajectory import Trajectory
from agentenv.core.visible import logger
from agentenv.runner.runner import Runner
from agentenv.training.learners.learner import Learner
from agentenv.training.loop.event_loop import beside_the_loop
from agentenv.training.loop.mixture import Mixture
from agentenv.training.loop.sync import WeightSync
from agentenv.training.loop.usable import cause_of

__all__ = ["play_held_out", "scores_of"]

log = logger(__name__)


async def play_held_out(
    runner: Runner,
    mixture: Mixture,
    learner: Learner,
    sync: WeightSync,
    *,
    temperature: float | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> dict[str, float]:
    """Play the held-out tasks of all environments and return the scores; see `GRPOTrainer.evaluate`.

    Args:
        runner: a runner with the sampling settings of the training.
        mixture: the environments.
        learner: the learner, which knows the options and the other processes.
        sync: brings the newest weights to the engine first.
        temperature: sampling temperature; None means that of the options.
        on_trajectory: called with each episode as it finishes.
    """
    await sync.follow()
    config = learner.config
    metrics: dict[str, float] = {}
    world = learner.world
    temperature = config.evaluation.eval_temperature if temperature is None else temperature
    sampling = replace(runner.sampling, temperature=temperature, keep_support=False)
    size = config.evaluation.num_generations_eval
    ids = [entry.id for entry in mixture.specs]
    for index, (entry, name) in enumerate(zip(mixture.specs, mixture.names, strict=True)):
        tasks = mixture.held_out(entry)
        if tasks is None:
            continue
        limit = config.evaluation.eval_tasks
        if tasks.endless and not limit:
            log.warning("%s is not evaluated: its held-out tasks are endless; set eval_tasks", entry.id)
            continue
        chosen = list(tasks.take(limit) if limit else tasks)
        mine = chosen[world.rank :: world.size]
        log.info("held-out episodes: %d of %d are played", 0, len(mine) * size)
        prefix = "eval" if len(mixture.specs) == 1 else f"eval/{name}"
        played = runner.run_groups(
            entry,
            mine,
            size,
            sampling=sampling,
            repeats=[ids[:index].count(entry.id)] * len(mine),  # groups of its own for each entry
            on_trajectory=on_trajectory,
        )
        groups = [group async for group in played]
        rewards = [[trajectory.reward for trajectory in group] for group in groups]
        if groups and not any(reward is not None for group in rewards for reward in group):
            what, where = cause_of(groups[0][0])
            log.warning("no held-out episode was scored; the first one: %s (%s)", what, where)
        # Another process may take longer, and the next batch is being played meanwhile.
        everyone = await beside_the_loop(partial(world.gather, rewards))
        metrics |= {f"{prefix}/{score}": value for score, value in scores_of(everyone, size).items()}
    return metrics


def scores_of(rewards: Sequence[Sequence[float | None]], size: int) -> dict[str, float]:
    """Return the scores of an evaluation from the rewards of each task's episodes.

    A task with fewer than `size` scored episodes is left out of pass@k.
    """
    scored = [[reward for reward in episodes if reward is not None] for episodes in rewards]
    known = [reward for episodes in scored for reward in episodes]
    counts = {
        "tasks": float(len(rewards)),
        "unscored": float(sum(map(len, rewards)) - len(known)),
    }
    if not known:
        return counts
    # Many trainings hold no tasks out.
    from agentenv.runs.stats import clustered_mean

    passed = [[float(reward >= 1.0) for reward in episodes] for episodes in scored]
    interval = clustered_mean({str(task): episodes for task, episodes in enumerate(passed)})
    scores = {
        "success": interval.mean,
        "success_low": interval.low,
        "success_high": interval.high,
        "reward": sum(known) / len(known),
    }
    full = [episodes for episodes in passed if len(episodes) == size]
    if size > 1:
        scores[f"avg@{size}"] = interval.mean
    if size > 1 and full:
        scores[f"pass@{size}"] = sum(map(max, full)) / len(full)
    return scores | counts
