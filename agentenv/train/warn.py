"""Early warnings: what a run's metrics say in words, before hours are lost."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["early_warnings"]

FIRST_STEPS = 3
MAX_MISMATCH = 0.05
"""k3 right after a sync is about 5e-3 with the right weights and 4 with wrong ones."""
MAX_OUTSIDE = 0.3
MIN_ENTROPY = 0.01
MAX_TRUNCATED = 0.5


def early_warnings(history: Sequence[dict[str, float]]) -> list[str]:
    """Return what is wrong at the last step, each problem once when it begins.

    Args:
        history: metrics of the steps so far, the last one included.
    """
    now = _problems(history)
    before = _problems(history[:-1]).keys() if len(history) > 1 else ()
    return [text for name, text in now.items() if name not in before]


def _problems(history: Sequence[dict[str, float]]) -> dict[str, str]:
    if not history:
        return {}
    last = history[-1]
    found: dict[str, str] = {}
    recent = [one.get("groups/frac_mixed", 1.0) for one in history[-FIRST_STEPS:]]
    if not any(recent):
        if last.get("groups/frac_all_good", 0.0) == 1.0:
            found["solved"] = (
                "every episode of every group is right: nothing is left to learn from these tasks"
            )
        else:
            found["mixed"] = (
                "no group has mixed rewards, so there is no gradient: warm the model up on demonstrations, "
                "choose easier tasks, or raise num_generations"
            )
    if last.get("mismatch/k3", 0.0) > MAX_MISMATCH or last.get("mismatch/frac_outside", 0.0) > MAX_OUTSIDE:
        found["mismatch"] = (
            f"sampler and trainer disagree (k3 {last['mismatch/k3']:.3g}): wrong weights in the engine, "
            "another chat template or temperature, or very stale episodes"
        )
    if "entropy" in last and last["entropy"] < MIN_ENTROPY and last.get("reward", 1.0) < 0.9:
        found["entropy"] = (
            f"entropy has collapsed to {last['entropy']:.3g} before the tasks are solved: "
            "raise epsilon_high, add entropy_coef, or lower the learning rate"
        )
    if last.get("completions/clipped_ratio", 0.0) > MAX_TRUNCATED:
        found["truncated"] = (
            f"{last['completions/clipped_ratio']:.0%} of the episodes hit a limit: raise max_turns or "
            "max_tokens_per_turn, or shorten the task"
        )
    if last.get("updates/not_finite", 0.0):
        found["not_finite"] = "a gradient was not finite; that update was left out"
    return found
