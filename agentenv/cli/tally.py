"""Count episodes while they are played, for the lines and the table that show the progress of a run."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

from agentenv.cli.phase import Phase
from agentenv.core.visible import innermost, show_only, visible
from agentenv.runner.watchdog import Waiting
from agentenv.runs.stats import RunningMean
from agentenv.runs.store.summary import EpisodeSummary

__all__ = ["Screen", "Tally", "interval_text", "waiting_text"]

FIRST_LINE_S = 5.0
"""Time until the first line where there is no terminal; it doubles from line to line, up to a limit."""
ALMOST = 0.9
"""Most that an episode which is being played counts as, however many tokens it has."""


@dataclass
class Tally:
    """Figures of some episodes so far. Adding one costs the same however many there are."""

    group_size: int = 0
    """Number of episodes of each task; a task is done when it has so many. 0 if tasks are not counted."""
    began: float = field(default_factory=time.monotonic)
    episodes: int = 0
    tasks_done: int = 0
    failed: int = 0
    tokens: int = 0
    """Tokens sampled in the episodes that were finished since `began`."""
    sampled: Callable[[], int] | None = None
    """Returns how many tokens the engine has sampled, also of the episodes that are being played."""
    reward: RunningMean = field(default_factory=RunningMean)
    _members: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    _earlier: int = 0
    """Episodes that were played before `began`."""
    _before: int = 0
    """Tokens that the engine sampled before `began`."""

    def __post_init__(self) -> None:
        self._before = 0 if self.sampled is None else self.sampled()

    def add(self, summary: EpisodeSummary, *, earlier: bool = False) -> None:
        """Count an episode; the tokens of one that was played earlier say nothing about today's speed."""
        self.episodes += 1
        self._earlier += earlier
        self.failed += bool(summary.error)
        self.tokens += 0 if earlier else summary.sampled_tokens
        task = (summary.env_id, summary.task_id)
        self._members[task] += 1
        self.tasks_done += self._members[task] == self.group_size
        if summary.scored:
            self.reward.add("\n".join(task), summary.reward or 0.0)

    def all_tokens(self) -> int:
        """Return the tokens sampled since `began`, as far as the engine tells them before an episode ends."""
        return max(self.tokens, 0 if self.sampled is None else self.sampled() - self._before)

    def speed(self) -> str:
        """Return the sampled tokens a second."""
        return f"{self.all_tokens() / max(1e-9, time.monotonic() - self.began):,.0f} tok/s"

    def phase(self, name: str, total: int, playing: int, each: float) -> Phase:
        """Return how much of so many episodes is played; those being played count by their tokens.

        Args:
            name: what is played.
            total: number of all episodes.
            playing: number of episodes that may be played at once.
            each: tokens of an episode that is not short. The first ones to finish are, so an episode that is
                being played counts as one of these, or as the mean of the finished ones if that is more.
        """
        each = max(each, self.tokens / max(1, self.episodes - self._earlier))
        playing = min(playing, total - self.episodes)
        under_way = min((self.all_tokens() - self.tokens) / max(1.0, each), ALMOST * playing)
        share = (self.episodes + under_way) / total
        return Phase(name, min(1.0, share), "", self.began, self._earlier / total)

    def facts(self) -> str:
        """Return speed, mean reward with its interval, and the number of failed episodes, on one line."""
        mean = f"{self.reward.mean:.3f}" if self.reward.count else "-"
        limits = interval_text(self.reward)
        return f"{self.speed()}  reward {mean}{f' {limits}' if limits else ''}  err {self.failed}"


def interval_text(reward: RunningMean) -> str:
    """Return the interval of the mean; empty if it has none yet, because one value has no spread."""
    if reward.count < 2:
        return ""
    found = reward.interval()
    return f"[{found.low:.3f}, {found.high:.3f}]"


def waiting_text(waits: Sequence[Waiting]) -> str:
    """Return what episodes wait for, the most frequent first, each with its longest wait."""
    counts = Counter(wait.boundary for wait in waits)
    longest = {wait.boundary: wait.seconds for wait in sorted(waits, key=lambda wait: wait.seconds)}
    return ", ".join(f"{name} {count} ({longest[name]:.0f} s)" for name, count in counts.most_common())


class Screen:
    """Shows what changes: live at the bottom of a terminal, and elsewhere as a line every so often.

    Args:
        view: returns what rich shows on a terminal.
        line: returns the line for elsewhere; an empty one is not printed.
        every_s: seconds between two lines.
    """

    def __init__(self, view: Callable[[], Any], line: Callable[[], str], every_s: float) -> None:
        self._view, self._line, self._every_s = view, line, every_s
        self._live: Any = None
        self._stopped = Event()
        self._thread = Thread(target=self._tell, name="progress", daemon=True)

    def start(self) -> None:
        """Begin to show."""
        if not sys.stdout.isatty():
            self._thread.start()
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(file=innermost(sys.stdout), highlight=False)
        live = Live(get_renderable=self._view, console=console, refresh_per_second=4, transient=True)
        live.start(refresh=True)
        self._live = live
        show_only()  # rich put streams of its own in our place, and takes them away when it stops

    def stop(self) -> None:
        """End it, and wait for the last line."""
        self._stopped.set()
        if self._live is not None:
            self._live.stop()
        elif self._thread.is_alive():
            self._thread.join()

    def say(self, text: str) -> None:
        """Print a line above what is shown."""
        if self._live is not None:
            self._live.console.print(visible(text), markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def _tell(self) -> None:
        wait_s = FIRST_LINE_S
        while not self._stopped.wait(min(wait_s, self._every_s)):
            wait_s *= 2
            if line := self._line():
                self.say(f" {line}")
