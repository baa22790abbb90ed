"""The training dashboard: a few numbers per step that show early whether a run goes well."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from agentenv.cli.phase import Phase, left_text, loading, phase_view
from agentenv.cli.tally import Screen, Tally, waiting_text
from agentenv.core.limits import SMALL_TURN_TOKENS
from agentenv.runs.store.index import new_summaries

if TYPE_CHECKING:
    from agentenv.core.trajectory import Trajectory
    from agentenv.training.request import TrainPlan

__all__ = ["Dashboard", "held_out_lines", "sparkline", "step_line"]

_runner_log = logging.getLogger("agentenv.runner.runner")
_REPORTING = tuple(
    logging.getLogger(f"agentenv.training.{name}")
    for name in ("loop.sft", "loop.held_out", "learners.torch.passes")
)
"""What says how far a part of the training is, in records such as `update %d of %d passes`."""
_OF = " %d of %d"
_BARS = "▁▂▃▄▅▆▇█"
LINE_EVERY_S = 30.0
"""Time between two lines about what is played, where there is no terminal."""
_HELD_OUT, _SHOWN = "held-out-", "demonstration:"
"""With what the group ids of episodes begin that no step is made of."""
_RECENT = 5
"""Steps whose time tells how long the next ones take."""


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


def held_out_lines(
    scores: Mapping[str, float], drawn: str, before: Mapping[str, float] | None = None
) -> list[str]:
    """Return a line with the held-out success for each environment that was scored.

    Args:
        scores: metrics; with several environments the scores of each one have its name.
        drawn: how the episodes were sampled.
        before: the scores before the first step, which then stand first.
    """
    lines: list[str] = []
    for name in scores:
        prefix, _, score = name.rpartition("/")
        if not prefix.startswith("eval") or score != "success":
            continue
        own = {key.rpartition("/")[2]: value for key, value in scores.items() if key.startswith(f"{prefix}/")}
        several = [f"{key} {value:.3f}" for key, value in own.items() if "@" in key]
        of = f" of {env}" if (env := prefix.partition("/")[2]) else ""
        success = _success(scores, prefix)
        if before and f"{prefix}/success" in before:
            success = f"{_success(before, prefix)} before the first step, {success} after the last"
        what = f"held-out success{of} {success} on {own['tasks']:.0f} tasks"
        lines.append(", ".join([what, drawn, *several]))
    return lines


def _success(scores: Mapping[str, float], prefix: str) -> str:
    mean, low, high = (scores[f"{prefix}/success{end}"] for end in ("", "_low", "_high"))
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


class _Records(logging.Handler):
    """Prints warnings and what the runner says, and shows how far the trainer says that it is."""

    def __init__(self, board: Dashboard) -> None:
        super().__init__()
        self._board = board

    def emit(self, record: logging.LogRecord) -> None:
        template, numbers = str(record.msg), record.args
        if record.levelno >= logging.WARNING:
            self._board.say(f" ! {record.getMessage()}")
        elif record.name == _runner_log.name:
            self._board.say(f" {record.getMessage()}")
        elif _OF in template and isinstance(numbers, tuple):
            done, total = (int(str(number)) for number in numbers[:2])
            self._board.report(template.partition(_OF)[0], done, total)


class Dashboard:
    """Prints each finished step and every warning at once, and shows what is done between two steps.

    That is a moving bar on a terminal, and a line every so often elsewhere: loading, the warm-up, playing and
    updating, each with an estimate of its end. The episodes are read from the run's directory, which has them
    wherever they were played.
    """

    def __init__(self, *, quiet: bool = False, model: str = "") -> None:
        self._num_steps = 0
        self.drawn = ""
        """How the held-out episodes are sampled."""
        self._plan: TrainPlan | None = None
        self._history: list[Mapping[str, float]] = []
        self._handler = _Records(self)
        self._screen = None if quiet else Screen(self._view, self.line, LINE_EVERY_S)
        self._lock = Lock()
        self._step = 0
        self._phase = loading(model)
        """What the trainer does; its share is 1 while it plays episodes."""
        self._offset = 0
        self._tally, self._held_out, self._num_held_out = Tally(), Tally(), 0

    def begin(self, plan: TrainPlan) -> None:
        """Print the environments, the model and the size of the run, and begin to watch it."""
        config, self._plan, self._num_steps = plan.config, plan, plan.config.max_steps
        warm = config.evaluation.eval_temperature
        self.drawn = f"temperature {warm:g}" if warm else "greedy"
        self._step = plan.resumed_step
        self._offset = new_summaries(plan.path, 0)[1]
        self.say(
            f"{', '.join(plan.envs)} · {config.model} · {config.max_steps} steps of "
            f"{config.sampling.groups_per_step} tasks × {config.sampling.num_generations} · "
            f"seed {config.seed}   run {plan.id}"
        )
        if plan.terms:
            self.say(f" terms of the reward: {' · '.join(plan.terms)}")
        if plan.resumed_step:
            self.say(f" resumed at step {plan.resumed_step}")

    def warmed_up(self, shown: Sequence[Trajectory]) -> None:
        """Print the number and the mean reward of the demonstrations."""
        rewards = sum(trajectory.reward or 0.0 for trajectory in shown)
        self.say(f" warm-up on {len(shown)} demonstrations, mean reward {rewards / max(1, len(shown)):.2f}")

    def report(self, phase: str, done: int, total: int) -> None:
        """Show how far a part of the run is."""
        with self._lock:
            self._has_loaded()
            if phase.startswith("held-out"):
                self._num_held_out, self._held_out = total, self._new_tally()
                self._phase = Phase(share=1.0)
            elif phase == self._phase.name or not self._warms_up:
                self._phase.at(phase, done, total)
            if self._phase.share == 1 and not self._tally.episodes:
                self._tally = self._new_tally()

    def _has_loaded(self) -> bool:
        """Keep how long the model was loaded, if it was until now, and return whether it was."""
        loaded = self._phase.name.startswith("loading")
        if loaded:
            self._phase.keep()
        return loaded

    @property
    def _warms_up(self) -> bool:
        """Whether a warm-up is under way, whose steps say more than their passes."""
        return self._phase.name.startswith("warm-up") and self._phase.share < 1

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._screen is not None:
            self._screen.say(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step."""
        self._history.append(metrics)
        self.say(step_line(step, self._num_steps, self._history))
        self._begin_anew(step)

    def scored(self, scores: Mapping[str, float]) -> None:
        """Print the scores before the first step."""
        for line in held_out_lines(scores, self.drawn):
            self.say(f" before the first step: {line}")
        self._begin_anew(0)

    def _begin_anew(self, step: int) -> None:
        if self._plan is not None:
            with self._lock:
                self._offset = new_summaries(self._plan.path, self._offset)[1]
                self._tally, self._num_held_out, self._step = self._new_tally(), 0, step
                self._phase = Phase(share=1.0)

    def line(self) -> str:
        """Return what is done now and when it ends, and what the episodes being played wait for.

        After the last step nothing is played, so the line is empty.
        """
        if self._plan is None:
            return self._phase.line()
        waits = waiting_text(self._plan.waiting()) if self._plan.waiting is not None else ""
        with self._lock:
            if waits and self._has_loaded():
                self._phase, self._tally = Phase(share=1.0), self._new_tally()
            self._count(self._plan.path)
            if self._step and self._step >= self._num_steps:
                return ""
            parts = [self._playing(self._plan) if self._phase.share == 1 else self._phase.line()]
            parts += [self._run_left()] if self._step else []
        return "  ".join(filter(None, [*parts, f"waiting for {waits}" if waits else ""]))

    def _count(self, path: Path) -> None:
        found, self._offset = new_summaries(path, self._offset)
        for summary in found:
            if summary.group_id.startswith(_HELD_OUT):
                self._held_out.add(summary)
            elif not summary.group_id.startswith(_SHOWN):
                self._tally.add(summary)

    def _playing(self, plan: TrainPlan) -> str:
        """Return how much of the step's episodes is played, or of the held-out ones."""
        phase = self._played(plan)
        if self._num_held_out:
            count = f"{self._held_out.episodes} of {self._num_held_out} held-out episodes"
            return "  ".join(filter(None, [count, phase.left(), self._held_out.facts()]))
        size = _size(plan)
        count = f"step {self._step + 1}/{self._num_steps}  {self._tally.episodes} episodes ({size} a step)"
        return "  ".join(filter(None, [count, phase.left(), self._tally.facts()]))

    def _played(self, plan: TrainPlan) -> Phase:
        tally, total = self._tally, _size(plan)
        if self._num_held_out:
            tally, total = self._held_out, self._num_held_out
        last = self._history[-1] if self._history else {}
        each = last.get("completions/mean_length", plan.limits.max_tokens_per_turn or SMALL_TURN_TOKENS)
        return tally.phase("play", total, total, each)

    def _run_left(self) -> str:
        recent = [metrics["step_time"] for metrics in self._history[-_RECENT:] if "step_time" in metrics]
        left = (self._num_steps - self._step) * sum(recent) / max(1, len(recent))
        return f"run: {left_text(left)}" if recent else ""

    def _new_tally(self) -> Tally:
        return Tally(sampled=None if self._plan is None else self._plan.sampled)

    def _view(self) -> Any:
        line = self.line() or "finishing"
        plan = self._plan
        return phase_view(self._phase if plan is None or self._phase.share < 1 else self._played(plan), line)

    def __enter__(self) -> Self:
        logging.getLogger("agentenv").addHandler(self._handler)
        for told in (*_REPORTING, _runner_log):
            told.setLevel(logging.INFO)
        if self._screen is not None:
            self._screen.start()
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("agentenv").removeHandler(self._handler)
        for told in (*_REPORTING, _runner_log):
            told.setLevel(logging.NOTSET)
        if self._screen is not None:
            self._screen.stop()


def _size(plan: TrainPlan) -> int:
    """Return the number of episodes of a step."""
    return plan.config.sampling.groups_per_step * plan.config.sampling.num_generations
