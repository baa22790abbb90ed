"""Results as data frames of pandas, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from agentenv.core.errors import DependencyMissing
from agentenv.runs.store.summary import EpisodeSummary

__all__ = ["episode_frame", "frame"]


def frame(rows: Iterable[Mapping[str, object]]) -> Any:
    """Return a `pandas.DataFrame` with a row for each mapping.

    Raises:
        DependencyMissing: pandas is not installed.
    """
    DependencyMissing.require("pandas", extra="notebook", purpose="to_dataframe()")
    return import_module("pandas").DataFrame(list(map(dict, rows)))


def episode_frame(summaries: Iterable[EpisodeSummary]) -> Any:
    """Return a `pandas.DataFrame` with a row for each episode; named rewards have columns `rewards/NAME`.

    Raises:
        DependencyMissing: pandas is not installed.
    """
    return frame(map(_row, summaries))


def _row(summary: EpisodeSummary) -> dict[str, object]:
    return {
        "env_id": summary.env_id,
        "task_id": summary.task_id,
        "member": summary.member,
        "reward": summary.reward,
        "stop_reason": summary.stop_reason.value,
        "num_turns": summary.num_turns,
        "num_tool_calls": len(summary.tools),
        "total_tokens": summary.total_tokens,
        "sampled_tokens": summary.sampled_tokens,
        "trained_tokens": summary.trained_tokens,
        "total_s": summary.timings.get("total_s"),
        "question": summary.question,
        "answer": summary.answer,
        "expected": summary.expected,
        "error": summary.error,
        "seed": summary.seed,
        **{f"rewards/{name}": value for name, value in summary.rewards.items()},
    }
