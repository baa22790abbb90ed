"""Say what a training spends its time on, and what would make it faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["busiest_bound"]

_ADVICE = {
    "groups": "batches that wait for their longest episode play faster as a stream (max_ahead=2)",
    "queued": "groups wait for room: raise runner.concurrency, or add servers",
    "allowed": "every group that may begin is being played: raise max_ahead, or make episodes faster",
    "staleness": "raise max_ahead, or bound the length of episodes (limits)",
    "both": "playing takes nearly as long: faster devices for either help",
    "training": "playing is fast enough: use faster or more training devices",
    "weights": "bring the weights less often (more groups_per_step) or over a faster path",
}


def busiest_bound(history: Sequence[Mapping[str, float]]) -> str:
    """Return a sentence that names what the steps spent most of their time on; empty without times.

    Args:
        history: metrics of the steps. The first step is left out if there are others, because it also pays
            for what happens once.
    """
    steps = [step for step in history[min(1, len(history) - 1) :] if "step_time" in step] if history else []
    total = sum(step["step_time"] for step in steps)
    if total <= 0:
        return ""

    def seconds(*names: str) -> float:
        return sum(step.get(f"time/{name}", 0.0) for step in steps for name in names)

    spent = {
        "groups": seconds("wait/groups"),
        "staleness": seconds("wait/staleness"),
        "training": seconds("logprob", "update"),
        "weights": seconds("sync"),
    }
    bound = max(spent, key=spent.__getitem__)
    what = {
        "groups": "waited for groups to finish",
        "staleness": "had enough groups and waited for older ones, which the bound of max_ahead puts first",
        "training": "trained",
        "weights": "brought the weights to the engine",
    }[bound]
    advice = bound
    if bound == "groups" and "stream/queued" in steps[-1]:
        queued = sum(step.get("stream/queued", 0.0) for step in steps) / len(steps)
        advice = "queued" if queued >= 1 else "allowed"
    # Training may take longest by a hair.
    if bound == "training" and spent["groups"] + spent["staleness"] > spent["training"] / 2:
        advice = "both"
    return f"{spent[bound] / total:.0%} of the time the trainer {what}; {_ADVICE[advice]}"
