"""`agentenv diff`: what changed between two runs, paired by task."""

from __future__ import annotations

import json
import sys

import typer

from agentenv.cli.options import JsonOption, RunsDirOption

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def run(
    before: str = typer.Argument(..., metavar="BEFORE", help="Run to compare with."),
    after: str = typer.Argument(..., metavar="AFTER", help="Run that is judged."),
    show: int = typer.Option(5, "--show", help="Most changed tasks to list."),
    seed: int = typer.Option(0, "--seed", help="Seed of the bootstrap."),
    runs_dir: str = RunsDirOption,
    as_json: bool = JsonOption,
) -> None:
    """Compare two runs: paired difference with an interval, and where episodes part."""
    from agentenv.core.errors import UsageError
    from agentenv.runs.compare import compare
    from agentenv.runs.store.reader import find_run

    found = compare(find_run(before, runs_dir), find_run(after, runs_dir), seed=seed)
    if found.difference is None:
        raise UsageError("the runs have no scored task in common", remedy="compare runs of the same tasks")
    if as_json:
        sys.stdout.write(json.dumps(found.as_json()) + "\n")
        return
    change = found.difference
    same = len(found.tasks) - len(found.better) - len(found.worse)
    print(
        f"reward {found.before:.3f} → {found.after:.3f}   {change.mean:+.3f}"
        f" [{change.low:+.3f}, {change.high:+.3f}] 95 %, paired over {len(found.tasks)} tasks"
    )
    print(f"{len(found.better)} tasks better · {len(found.worse)} worse · {same} same")
    if found.only_before or found.only_after:
        print(
            f"not compared: {found.only_before} tasks only in the first run, {found.only_after} in the second"
        )
    for one in sorted(found.tasks, key=lambda task: -abs(task.change))[:show]:
        if one.change:
            print(f"  {one.task_id}  {one.before:.3f} → {one.after:.3f}  {one.change:+.3f}")
    split = found.divergence
    if split is None:
        print("episodes agree token by token")
    else:
        token = "" if split.token is None else f", token {split.token}"
        print(f"first divergence: task {split.task_id}, member {split.member}, turn {split.turn}{token}")
