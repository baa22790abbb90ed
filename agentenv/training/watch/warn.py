"""Early warnings: sentences that name the problems which a run's metrics show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agentenv.core.errors import TrainingFailed
from agentenv.core.trajectory import StopReason, TrajectoryGroup
from agentenv.envs.advice import of_one_reward

if TYPE_CHECKING:
    from agentenv.training.learners.torch.world import World

__all__ = ["TaskLedger", "early_warnings", "require_agreement"]

FIRST_STEPS = 3
MAX_MISMATCH = 0.05
"""Largest k3 without a warning. Right after a sync, k3 is about 5e-3 with right weights and 4 with wrong
ones."""
MAX_OUTSIDE = 0.3
HOPELESS_MISMATCH = 0.2
"""k3 of a batch that no correction for stale samples explains: the tokens were sampled from other weights."""
MIN_ENTROPY = 0.01
MAX_TRUNCATED = 0.5
MAX_LEFT_OUT = 0.5
FLAT_STEPS = 5
"""Number of steps whose mean reward is compared with that of as many before them."""
MIN_TASKS = 8
"""Number of different tasks that must be played before a warning that only one of them earned a reward."""


class TaskLedger:
    """Counts, over a run, the tasks that ever earned more than the lowest reward of the run."""

    def __init__(self) -> None:
        self._best: dict[tuple[str, str], float] = {}
        self._worst = inf

    def record(self) -> dict[str, Any]:
        """Return the counts as JSON values, for a checkpoint."""
        worst = self._worst if self._best else None
        return {"best": [[*task, best] for task, best in self._best.items()], "worst": worst}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Set the counts to what `record` returned."""
        self._best = {(env, task): best for env, task, best in record["best"]}
        self._worst = inf if record["worst"] is None else record["worst"]

    def add(self, world: World, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Add a step's episodes of all processes, and return the counts so far.

        Returns:
            `tasks/met` and `tasks/rewarded`; with several environments also `envs/met`, `envs/rewarded`.
        """
        own = [
            ((one.env_id, one.task_id), one.reward)
            for group in groups
            for one in group
            if one.reward is not None and isfinite(one.reward)
        ]
        for task, reward in world.gather(own):
            self._best[task] = max(self._best.get(task, -inf), reward)
            self._worst = min(self._worst, reward)
        rewarded = [task for task, best in self._best.items() if best > self._worst]
        counts = {"tasks/met": float(len(self._best)), "tasks/rewarded": float(len(rewarded))}
        met = {env for env, _ in self._best}
        if len(met) > 1:
            counts |= {"envs/met": float(len(met)), "envs/rewarded": float(len({env for env, _ in rewarded}))}
        return counts


def early_warnings(history: Sequence[dict[str, float]]) -> list[str]:
    """Return the problems of the last step that the step before it did not have.

    Args:
        history: metrics of the steps so far, the last one included.
    """
    now = _problems(history)
    before = _problems(history[:-1]).keys() if len(history) > 1 else ()
    return [text for name, text in now.items() if name not in before]


def require_agreement(history: Sequence[Mapping[str, float]]) -> None:
    """Check that the engine has sampled from the weights in training, as far as the last steps tell.

    Only steps without stale episodes tell: the others' tokens are from weights that have been trained since.

    Raises:
        TrainingFailed: Its log-probabilities were those of other weights for several such steps in a row.
    """
    fresh = [step for step in history if step.get("staleness/max", 0.0) <= 0]
    mismatches = [step.get("mismatch/k3", 0.0) for step in fresh[-FIRST_STEPS:]]
    if len(mismatches) == FIRST_STEPS and min(mismatches) > HOPELESS_MISMATCH:
        raise TrainingFailed(
            f"the tokens of {FIRST_STEPS} steps were not sampled from the weights in training: k3 "
            f"{', '.join(f'{value:.2g}' for value in mismatches)} (limit {HOPELESS_MISMATCH})",
            remedy="`agentenv doctor -m MODEL` compares the engine; the weights of the last step are saved",
        )


def _problems(history: Sequence[dict[str, float]]) -> dict[str, str]:
    if not history:
        return {}
    last = history[-1]
    problems: dict[str, str] = {}
    left_out = _left_out(last)
    if last.get("episodes") == 0.0:
        problems["empty"] = "the batch has no episodes: there is nothing to train on"
    elif sum(left_out.values()) > MAX_LEFT_OUT * last.get("episodes", 0.0):
        reasons = ", ".join(f"{count:.0f} {reason}" for reason, count in left_out.items())
        problems["left_out"] = (
            f"of {last['episodes']:.0f} episodes most were left out of training: {reasons}; "
            "see their stop reasons, errors and why they are not trainable with agentenv view"
        )
    else:
        problems |= _not_learning(history)
    if last.get("mismatch/k3", 0.0) > MAX_MISMATCH or last.get("mismatch/frac_outside", 0.0) > MAX_OUTSIDE:
        problems["mismatch"] = (
            f"sampler and trainer disagree (k3 {last['mismatch/k3']:.3g}): wrong weights in the engine, "
            "another chat template or temperature, or very stale episodes"
        )
    if "entropy" in last and last["entropy"] < MIN_ENTROPY and last.get("reward", 1.0) < 0.9:
        problems["entropy"] = (
            f"entropy has collapsed to {last['entropy']:.3g} before the tasks are solved: "
            "raise epsilon_high, add entropy_coef, or lower the learning rate"
        )
    if last.get("completions/clipped_ratio", 0.0) > MAX_TRUNCATED:
        problems["truncated"] = f"{last['completions/clipped_ratio']:.0%} of the episodes {_limit(last)}"
    if last.get("tasks/rewarded") == 1.0 and last["tasks/met"] >= MIN_TASKS:
        problems["one_task"] = (
            f"of {last['tasks/met']:.0f} different tasks only one has ever earned a reward: the model will "
            "learn that one; choose easier tasks or warm the model up on more of them"
        )
    if last.get("envs/rewarded") == 1.0 and last["tasks/met"] >= MIN_TASKS:
        problems["one_environment"] = (
            f"of {last['envs/met']:.0f} environments only one has ever earned a reward: the others cost time "
            "and teach nothing; see <environment>/reward"
        )
    if last.get("updates/not_finite", 0.0):
        problems["not_finite"] = "a gradient was not finite; that update was left out"
    return problems


def _not_learning(history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return why the last steps taught nothing; empty if they did, as far as the rewards tell."""
    last = history[-1]
    spread = any(step.get("groups/frac_mixed", 1.0) for step in history[-FIRST_STEPS:])
    if spread or last.get("grad_norm"):  # distillation has a gradient without mixed rewards
        why = _flat(history)
        return {"flat": why} if why else {}
    if last.get("groups/frac_all_good", 0.0) == 1.0:
        solved = "every episode of every group is right: nothing is left to learn from these tasks"
        return {"solved": f"{solved}; choose harder ones, or stop here"}
    return {"mixed": f"no group has mixed rewards, so there is no gradient: {_why_equal(last)}"}


def _why_equal(metrics: Mapping[str, float]) -> str:
    """Return why the episodes of each group earned the same, and what to try."""
    if metrics.get("completions/clipped_ratio", 0.0) > MAX_TRUNCATED:
        return f"most episodes {_limit(metrics)}"
    if metrics.get("groups/frac_all_bad", 1.0) == 1.0:
        return (
            "no episode earns anything; warm the model up on demonstrations, or on more of them (num_demos), "
            "or choose easier tasks"
        )
    # Where no task of the run has earned more than the lowest reward, there was only one.
    one = not metrics.get("tasks/rewarded", 1.0) and metrics["tasks/met"] >= MIN_TASKS
    if one and (advice := of_one_reward({metrics["reward"]}, int(metrics["episodes"]))):
        return advice
    return "all episodes of a task earn the same; raise num_generations, or reward parts of a task"


def _limit(metrics: Mapping[str, float]) -> str:
    """Return the limit that cuts most episodes, and what to do about it."""
    limits = (reason for reason in StopReason if reason.remedy)
    reason = max(limits, key=lambda reason: metrics.get(f"stop/{reason}", 0.0))
    if not metrics.get(f"stop/{reason}"):
        return "hit a limit: raise it, or shorten the task"
    return f"are cut ({reason}): {reason.remedy}"


def _flat(history: Sequence[Mapping[str, float]]) -> str:
    """Return what to try where the reward does not rise although groups have spread; empty if it rises."""
    steps = history[-2 * FLAT_STEPS :]
    rewards = [step["reward"] for step in steps if step.get("groups/frac_mixed") and "reward" in step]
    if len(rewards) < 2 * FLAT_STEPS:
        return ""
    before, now = fmean(rewards[:FLAT_STEPS]), fmean(rewards[FLAT_STEPS:])
    if now > before or now >= 0.9:
        return ""
    return (
        f"the reward has not risen in {len(rewards)} steps though groups have spread ({before:.2f}, then "
        f"{now:.2f}): raise learning_rate (now {steps[-1].get('learning_rate', 0.0):.2g}) twofold, or "
        "groups_per_step; examples of what the model does wrong are in agentenv view"
    )


def _left_out(metrics: dict[str, float]) -> dict[str, float]:
    """Return the number of dropped episodes or rows by reason, except groups without spread."""
    others = ("dropped/zero_std_episodes", "dropped/demonstrations_")
    return {
        name.removeprefix("dropped/").replace("_", " "): count
        for name, count in metrics.items()
        if name.startswith("dropped/") and not name.startswith(others)
    }
