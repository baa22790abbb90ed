"""The training dashboard: a few numbers per step that show early whether a run goes well."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from agentenv.cli.tally import Screen, Tally, waiting_text
from agentenv.core.visible import visible
from agentenv.runs.store.index import new_summaries

if TYPE_CHECKING:
    from agentenv.core.trajectory import Trajectory
    from agentenv.training.request import TrainPlan

__all__ = ["Dashboard", "held_out_lines", "sparkline", "step_line"]

TELL_EVERY_S = 10.0
_warmup_log = logging.getLogger("agentenv.training.loop.sft")
_runner_log = logging.getLogger("agentenv.runner.runner")
_BARS = "▁▂▃▄▅▆▇█"
LINE_EVERY_S = 30.0
"""Time between two lines about what is played, where there is no terminal."""
_HELD_OUT, _SHOWN = "held-out-", "demonstration:"
"""With what the group ids of episodes begin that no step is made of."""


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """Return the last values as one line of bars, scaled from the smallest to the largest of them."""
    shown = [value for value in values if value == value][-width:]  # noqa: PLR0124 - NaN is not itself
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    return "".join(_BARS[round((value - low) / (high - low) * 7) if high > low else 0] for value in shown)


def step_line(step: int, num_steps: int, history: Sequence[Mapping[str, float]]) -> str:
    """Return the line of one training step; what was not computed in it is shown as `-`."""
    last = history[-1]

    def shown(name: str, form: str) -> str:
        return format(last[name], form) if name in last else "-"

    trained, context = last.get("tokens/action", 0.0), last.get("tokens/context", 0.0)
    share = f"{trained / (trained + context):.0%}" if trained + context else "-"
    curve = sparkline([metrics["reward"] for metrics in history if "reward" in metrics])
    parts = [
        f"step {step:>{len(str(num_steps))}}/{num_steps}  reward {shown('reward', '.2f')} {curve}",
        f"spread {shown('groups/frac_mixed', '.0%')}",
        f"entropy {shown('entropy', '.2f')}",
        f"clip {shown('clip_ratio/region_mean', '.0%')}",
        f"grad {shown('grad_norm', '.2g')}",
        f"gap max {shown('mismatch/abs_max', '.2g')}",
        f"trained {share}",
        f"truncated {shown('completions/clipped_ratio', '.0%')}",
        f"play {shown('time/rollout', '.1f')} s",
        f"wait {shown('time/wait', '.1f')} s",
        f"update {shown('time/update', '.1f')} s",
    ]
    if last.get("servers/failures"):
        parts.append(f"servers {shown('servers/used', '.0f')}, {shown('servers/failures', '.0f')} failures")
    if "kl" in last:
        parts.insert(3, f"KL {shown('kl', '.3f')}")
    if "eval/success" in last:
        parts.append(f"held-out {shown('eval/success', '.2f')}")
    return "  ".join(parts)


def held_out_lines(scores: Mapping[str, float], drawn: str) -> list[str]:
    """Return a line with the held-out success for each environment that was scored.

    Args:
        scores: metrics; with several environments the scores of each one have its name.
        drawn: how the episodes were sampled.
    """
    lines: list[str] = []
    for name in scores:
        prefix, _, score = name.rpartition("/")
        if not prefix.startswith("eval") or score != "success":
            continue
        own = {key.rpartition("/")[2]: value for key, value in scores.items() if key.startswith(f"{prefix}/")}
        several = [f"{key} {value:.3f}" for key, value in own.items() if "@" in key]
        interval = f"[{own['success_low']:.3f}, {own['success_high']:.3f}] on {own['tasks']:.0f} tasks"
        of = f" of {env}" if (env := prefix.partition("/")[2]) else ""
        lines.append(", ".join([f"held-out success{of} {own['success']:.3f} {interval}", drawn, *several]))
    return lines


class _Records(logging.Handler):
    """Prints warnings, what the runner says, and from time to time the progress of a warm-up."""

    def __init__(self, board: Dashboard) -> None:
        super().__init__()
        self._board = board
        self._told = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self._board.say(f" ! {record.getMessage()}")
        elif record.name == _runner_log.name:
            self._board.say(f" {record.getMessage()}")
        else:
            self._board.warming(record.getMessage())
            if time.monotonic() - self._told >= TELL_EVERY_S:
                self._told = time.monotonic()
                self._board.say(f"  {record.getMessage()}")


class Dashboard:
    """Prints each finished step and every warning at once, and shows what is played between two steps.

    What is played is a moving status line on a terminal, and a line every so often elsewhere. The episodes
    are read from the run's directory, which has them wherever they were played.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._num_steps = 0
        self.drawn = ""
        """How the held-out episodes are sampled."""
        self._plan: TrainPlan | None = None
        self._history: list[Mapping[str, float]] = []
        self._handler = _Records(self)
        self._screen = None if quiet else Screen(self._view, self._line_elsewhere, LINE_EVERY_S)
        self._spinner: Any = None
        self._lock = Lock()
        self._step = 0
        self._warming = ""
        """What the status line says of the warm-up, until an episode is played after it."""
        self._offset = 0
        self._tally, self._held_out = Tally(), 0

    def begin(self, plan: TrainPlan) -> None:
        """Print the environments, the model and the size of the run, and begin to watch it."""
        config, self._plan, self._num_steps = plan.config, plan, plan.config.max_steps
        warm = config.evaluation.eval_temperature
        self.drawn = f"temperature {warm:g}" if warm else "greedy"
        self._step = plan.resumed_step
        self._warming = "warm-up" if plan.demos != "none" and plan.checkpoint is None else ""
        self._offset = new_summaries(plan.path, 0)[1]
        self.say(
            f"{', '.join(plan.envs)} · {config.model} · {config.max_steps} steps of "
            f"{config.sampling.groups_per_step} tasks × {config.sampling.num_generations} · "
            f"seed {config.seed}   run {plan.id}"
        )
        if plan.resumed_step:
            self.say(f" resumed at step {plan.resumed_step}")
        if self._screen is not None:
            self._screen.start()

    def warmed_up(self, shown: Sequence[Trajectory]) -> None:
        """Print the number and the mean reward of the demonstrations."""
        rewards = sum(trajectory.reward or 0.0 for trajectory in shown)
        self.say(f" warm-up on {len(shown)} demonstrations, mean reward {rewards / max(1, len(shown)):.2f}")

    def warming(self, progress: str) -> None:
        """Show how far the warm-up is."""
        with self._lock:
            self._warming = progress

    def say(self, text: str) -> None:
        """Print a line above the status line."""
        if self._screen is not None:
            self._screen.say(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step, or the scores before the first one."""
        if not step:
            for line in held_out_lines(metrics, self.drawn):
                self.say(f" before the first step: {line}")
            return
        self._history.append(metrics)
        self.say(step_line(step, self._num_steps, self._history))
        if self._plan is not None:
            with self._lock:
                self._offset = new_summaries(self._plan.path, self._offset)[1]
                self._tally, self._held_out, self._step, self._warming = Tally(), 0, step, ""

    def line(self) -> str:
        """Return what was played since the last step, and what the episodes being played wait for.

        After the last step nothing is played, so the line is empty.
        """
        if self._plan is None:
            return ""
        with self._lock:
            found, self._offset = new_summaries(self._plan.path, self._offset)
            for summary in found:
                self._held_out += summary.group_id.startswith(_HELD_OUT)
                if not summary.group_id.startswith(_SHOWN):
                    self._warming = ""
                if not summary.group_id.startswith((_HELD_OUT, _SHOWN)):
                    self._tally.add(summary)
            config = self._plan.config
            if self._step >= config.max_steps:
                return ""
            size = config.sampling.groups_per_step * config.sampling.num_generations
            step = f"step {self._step + 1}/{config.max_steps}"
            parts = [step, f"{self._tally.episodes} episodes ({size} a step)", self._tally.facts()]
            if self._warming:
                parts = [self._warming]
            elif self._held_out and not self._step and not self._tally.episodes:
                parts = ["before the first step"]
            parts += [f"{self._held_out} held-out"] if self._held_out else []
        waits = waiting_text(self._plan.waiting()) if self._plan.waiting is not None else ""
        return "  ".join([*parts, *([f"waiting for {waits}"] if waits else [])])

    def _line_elsewhere(self) -> str:
        line = self.line()
        return "" if self._warming else line  # the warm-up tells its steps in lines of its own

    def _view(self) -> Any:
        from rich.spinner import Spinner
        from rich.text import Text

        self._spinner = self._spinner or Spinner("dots")
        self._spinner.update(text=Text(visible(self.line()) or "finishing"))
        return self._spinner

    def __enter__(self) -> Self:
        logging.getLogger("agentenv").addHandler(self._handler)
        for told in (_warmup_log, _runner_log):
            told.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("agentenv").removeHandler(self._handler)
        for told in (_warmup_log, _runner_log):
            told.setLevel(logging.NOTSET)
        if self._screen is not None:
            self._screen.stop()
