"""`agentenv diff`: show what changed between two runs, paired by task."""

from __future__ import annotations

import typer

from agentenv.cli.answer import print_json
from agentenv.cli.options import JsonOption, RunsDirOption

__all__ = ["run"]


def run(
    before: str = typer.Argument(..., metavar="BEFORE", help="First run, the reference."),
    after: str = typer.Argument(..., metavar="AFTER", help="Second run, compared with the first."),
    show: int = typer.Option(5, "--show", help="Number of tasks to list, the most changed first."),
    seed: int = typer.Option(0, "--seed", help="Seed of the bootstrap."),
    runs_dir: str = RunsDirOption,
    as_json: bool = JsonOption,
) -> None:
    """Compare two runs: the paired difference with an interval, and where episodes first differ."""
    from agentenv.core.errors import UsageError
    from agentenv.runs.compare import compare
    from agentenv.runs.store.reader import find_run

    first, second = find_run(before, runs_dir), find_run(after, runs_dir)
    comparison = compare(first, second, seed=seed)
    if comparison.difference is None:
        raise UsageError(
            f"no task has a score in both runs: {first.id} has {comparison.only_before} tasks with a score, "
            f"{second.id} {comparison.only_after}",
            remedy="compare runs of the same tasks",
        )
    if as_json:
        print_json(comparison.as_json())
        return
    if first.id == second.id:
        print(f"! both names mean the run {first.id}; agentenv runs lists the others")
    if comparison.changed:
        print(f"! not the same in both runs: {'; '.join(comparison.changed)}")
        print("  one reward for both: agentenv rescore RUN --reward FILE.py:NAME")
    change = comparison.difference
    same = len(comparison.tasks) - len(comparison.better) - len(comparison.worse)
    print(
        f"reward {comparison.before:.3f} → {comparison.after:.3f}   {change.mean:+.3f}"
        f" [{change.low:+.3f}, {change.high:+.3f}] 95 %, paired over {len(comparison.tasks)} tasks"
    )
    print(f"{len(comparison.better)} tasks better · {len(comparison.worse)} worse · {same} same")
    if comparison.only_before or comparison.only_after:
        print(
            f"not compared: {comparison.only_before} tasks only in the first run,"
            f" {comparison.only_after} only in the second"
        )
    for task in sorted(comparison.tasks, key=lambda task: -abs(task.change))[:show]:
        if task.change:
            print(f"  {task.task_id}  {task.before:.3f} → {task.after:.3f}  {task.change:+.3f}")
    split = comparison.divergence
    if split is None:
        print("the episodes agree token by token")
    else:
        token = "" if split.token is None else f", token {split.token}"
        print(f"first divergence: task {split.task_id}, member {split.member}, turn {split.turn}{token}")
