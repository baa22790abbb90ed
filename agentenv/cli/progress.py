"""Show the progress of an evaluation: a bar or, without a terminal, a line every so often, and new errors."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from agentenv.runs.store.summary import EpisodeSummary

__all__ = ["EvalProgress"]

LINE_EVERY_S = 30.0
"""Least time between two lines of progress where there is no terminal."""


class EvalProgress:
    """Counts finished episodes and shows their progress; prints nothing if `quiet` is set."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._evaluation: Any = None
        self._seen: set[str] = set()
        self._rewards = 0.0
        self._scored = 0
        self._failed = 0
        self._tokens = 0
        self._began = self._last_line = time.monotonic()
        self._done = 0
        self._total = 0

    def begin(self, evaluation: Any, run_id: str) -> None:
        """Print the head line and make the progress bar."""
        if self._quiet:
            return
        config = evaluation.config
        sizes = " + ".join(str(len(tasks)) for tasks in evaluation.tasks)
        names = ", ".join(spec.id for spec in evaluation.specs)
        print(
            f"{names} · {config.model} · {sizes} tasks × {config.group_size}"
            f" · {config.runner.concurrency} at once{_workers(config)} · seed {config.seed}   run {run_id}"
        )
        self._evaluation = evaluation
        self._done, self._total = evaluation.num_finished, evaluation.num_episodes
        if evaluation.num_finished:
            print(f" {evaluation.num_finished} episodes were finished earlier")
        if not sys.stdout.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[facts]}"))
        self._bar = Progress(*columns, console=Console(), transient=True)
        self._task = self._bar.add_task(
            "", total=evaluation.num_episodes, completed=evaluation.num_finished, facts=""
        )

    def episode(self, summary: EpisodeSummary) -> None:
        """Count one finished episode."""
        self._tokens += summary.sampled_tokens
        if summary.scored:
            self._scored += 1
            self._rewards += summary.reward or 0.0
        if summary.error:
            self._failed += 1
            if summary.error not in self._seen and len(self._seen) < 5:
                self._seen.add(summary.error)
                where = f" ({summary.where})" if summary.where else ""
                self._say(f" ✕ task {summary.task_id}: {summary.error}{where}")
        self._done += 1
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, advance=1, facts=self._facts(now))
        elif now - self._last_line >= LINE_EVERY_S and self._done < self._total:
            self._last_line = now
            self._say(f" {self._done} of {self._total} episodes  {self._facts(now)}")

    def _facts(self, now: float) -> str:
        rate = self._tokens / max(1e-9, now - self._began)
        mean = f"{self._rewards / self._scored:.3f}" if self._scored else "-"
        crew = "" if self._evaluation is None or not (its := self._evaluation.crew) else f"  {its.summary()}"
        return f"{rate:,.0f} tok/s  reward {mean}  err {self._failed}{crew}"

    def _say(self, text: str) -> None:
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _workers(config: Any) -> str:
    """Return where the episodes are played, if not in this process."""
    if not config.workers:
        return ""
    return f" on {config.workers} " + (f"workers of Ray ({config.ray})" if config.ray else "workers")
