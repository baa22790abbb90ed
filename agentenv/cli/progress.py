"""Show the progress of an evaluation: a live table or, without a terminal, a line every so often."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Self

from agentenv.cli.phase import Phase, loading, phase_view
from agentenv.cli.tally import Screen, Tally, interval_text, waiting_text
from agentenv.core.visible import visible
from agentenv.runs.store.summary import EpisodeSummary
from agentenv.workers.servers import servers_text

__all__ = ["EvalProgress"]

LINE_EVERY_S = 30.0
"""Time between two lines of progress where there is no terminal."""
_MAX_ERRORS = 5


class EvalProgress:
    """Counts finished episodes and shows their progress; prints nothing if `quiet` is set."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._evaluation: Any = None
        self._screen = None if quiet else Screen(self._table, self.line, LINE_EVERY_S)
        self._seen: set[tuple[str, str]] = set()
        self._all = Tally()
        self._envs: dict[str, Tally] = {}

    @contextmanager
    def loading(self, model: str) -> Generator[None]:
        """Show in this context that the model is loaded."""
        if self._quiet:
            yield
            return
        phase = loading(model)
        screen = Screen(lambda: phase_view(phase, phase.line()), phase.line, LINE_EVERY_S)
        screen.start()
        try:
            yield
            phase.keep()
        finally:
            screen.stop()

    def begin(self, evaluation: Any, run_id: str) -> None:
        """Print the head line, count what a stopped run finished, and begin to show the table."""
        if self._quiet:
            return
        config = evaluation.config
        sizes = " + ".join(str(len(tasks)) for tasks in evaluation.tasks)
        names = ", ".join(spec.id for spec in evaluation.specs)
        print(
            f"{names} · {config.model} · {sizes} tasks × {config.group_size}"
            f" · {evaluation.at_once.number} at once{_workers(config)} · seed {config.seed}   run {run_id}"
        )
        for note in filter(None, [evaluation.at_once.reason, evaluation.short_turns]):
            print(f" {note}")
        self._evaluation = evaluation
        self._all = Tally(config.group_size, sampled=evaluation.sampled)
        self._envs = {spec.id: Tally(config.group_size) for spec in evaluation.specs}
        for summary in evaluation.earlier:
            self._count(summary, earlier=True)
        if evaluation.num_finished:
            print(f" {evaluation.num_finished} episodes were finished earlier")
        assert self._screen is not None
        self._screen.start()

    def episode(self, summary: EpisodeSummary) -> None:
        """Count one finished episode, and print the first of each error."""
        if self._screen is None:
            return
        self._count(summary)
        if summary.error and summary.failure not in self._seen and len(self._seen) < _MAX_ERRORS:
            self._seen.add(summary.failure)
            where = f" ({summary.where})" if summary.where else ""
            self._screen.say(f" ✕ task {summary.task_id}: {summary.error}{where}")

    def _count(self, summary: EpisodeSummary, *, earlier: bool = False) -> None:
        for tally in (self._all, self._envs.get(summary.env_id)):
            if tally is not None:
                tally.add(summary, earlier=earlier)

    def line(self) -> str:
        """Return the progress on one line, with the figures of the table; it is empty at the end."""
        total = self._evaluation.num_episodes
        if self._all.episodes == total:
            return ""
        tasks = sum(map(len, self._evaluation.tasks))
        parts = [
            f"{self._all.episodes} of {total} episodes",
            f"{self._all.tasks_done} of {tasks} tasks",
            self._phase().left(),
            self._all.facts(),
        ]
        return "  ".join(filter(None, [*parts, *self._elsewhere()]))

    def _phase(self) -> Phase:
        playing = self._evaluation
        return self._all.phase(
            "play", playing.num_episodes, playing.at_once.number, float(playing.most_turn_tokens)
        )

    def _elsewhere(self) -> list[str]:
        """Return what the episodes wait for, and how many workers and servers do well, if there are any."""
        waits = waiting_text(self._evaluation.waiting())
        crew = self._evaluation.crew
        servers = servers_text(self._evaluation.servers())
        return [part for part in (waits and f"waiting for {waits}", crew and crew.summary(), servers) if part]

    def _table(self) -> Any:
        """Return the bar, a row for each environment, and what the episodes wait for."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        phase, total = self._phase(), self._evaluation.num_episodes
        bar = phase_view(phase, f"{self._all.episodes} of {total} episodes  {phase.left()}")
        table = Table(box=None, padding=(0, 2, 0, 1))
        for name in ("environment", "tasks", "episodes", "reward", "95 %", "failed"):
            table.add_column(name, justify="left" if name == "environment" else "right")
        for (name, tally), tasks in zip(self._envs.items(), self._evaluation.tasks, strict=True):
            mean = f"{tally.reward.mean:.3f}" if tally.reward.count else "-"
            row = (f"{tally.tasks_done}/{len(tasks)}", str(tally.episodes), mean, interval_text(tally.reward))
            table.add_row(Text(visible(name)), *row, str(tally.failed))
        return Group(bar, table, Text(visible(" " + " · ".join([self._all.speed(), *self._elsewhere()]))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            self._screen.stop()


def _workers(config: Any) -> str:
    """Return where the episodes are played, if not in this process."""
    if not config.workers:
        return ""
    return f" on {config.workers} " + (f"workers of Ray ({config.ray})" if config.ray else "workers")
