"""`agentenv runs`: list the runs of a directory, newest first."""

from __future__ import annotations

import sys
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer

from agentenv.cli.answer import print_json
from agentenv.cli.options import JsonOption, RunsDirOption

if TYPE_CHECKING:
    from agentenv.runs.store.reader import Run

__all__ = ["run"]


def run(
    words: list[str] = typer.Argument(None, metavar="WORD...", help="Show only what contains these words."),
    most: int = typer.Option(20, "-n", "--most", help="Most runs; 0 for all."),
    runs_dir: str = RunsDirOption,
    as_json: bool = JsonOption,
) -> None:
    """List runs: what played what, how many episodes there are, their mean reward, and how the run ended."""
    from agentenv.core.errors import UsageError
    from agentenv.core.visible import visible
    from agentenv.runs.store.reader import list_runs

    found = list_runs(runs_dir, on_broken=lambda error: print(f" left out: {error}", file=sys.stderr))
    rows = [row for row in map(_row, found) if all(word.lower() in str(row).lower() for word in words or [])]
    shown = rows[: most or None]
    if as_json:
        print_json(shown)
        return
    if not rows:
        raise UsageError(
            f"there are no runs {'with these words ' if found else ''}in {runs_dir}/",
            remedy="make a run with agentenv eval, or name another directory with --runs-dir",
        )
    lines = [
        [visible(str(cell)) for cell in (row["id"], row["kind"], row["envs"], row["model"], row["episodes"])]
        + ["-" if row["reward"] is None else f"{row['reward']:.3f}", str(row["status"])]
        + [visible(" · ".join(row["terms"]))]
        for row in shown
    ]
    heads = ["run", "kind", "environments", "model", "episodes", "reward", "status", "terms of the reward"]
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    for line in [heads, *lines]:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
    if len(rows) > len(shown):
        print(f"and {len(rows) - len(shown)} older runs; -n 0 lists all")


def _row(run: Run) -> dict[str, Any]:
    rewards = [row.reward for row in run.results if row.scored and row.reward is not None]
    # As in the viewer: the policy of a training changes from step to step, so all its episodes have no mean.
    steps = [line["reward"] for line in run.metrics() if isinstance(line.get("reward"), float)]
    return {
        "id": run.id,
        "kind": run.info.kind,
        "envs": ", ".join(run.info.env_ids),
        "model": run.info.model,
        "created": run.info.created,
        "status": run.status.value,
        "episodes": len(run),
        "scored": len(rewards),
        "reward": steps[-1] if steps else fmean(rewards) if rewards else None,
        "terms": [*(["the last step"] if steps else []), *run.terms],
    }
