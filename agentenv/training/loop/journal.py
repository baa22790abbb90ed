"""Write the steps of a run to `metrics.jsonl` and trackers, log warnings, and send a notice of a failure.

Only the first process writes. Any process may send the single notice of a launch: each of them can fail
first, and then the others fail as a consequence.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentenv.core.errors import DependencyMissing
from agentenv.core.visible import logger
from agentenv.training.config import GRPOConfig
from agentenv.training.step import GRPO
from agentenv.training.watch.track import Trackers
from agentenv.training.watch.warn import early_warnings

__all__ = ["Journal", "JsonLines", "told_of_failure"]

log = logger(__name__)

_TOLD = "_agentenv_told"
"""Attribute of an error of which a notice was sent; the loop tells first, and with the number of steps."""


class Journal:
    """Writes the steps of one run, as a context around the run.

    Raises:
        DependencyMissing: A tracker or apprise is named in the options and not installed.
        UsageError: A tracker is unknown.
    """

    def __init__(self, grpo: GRPO[Any]) -> None:
        self._grpo = grpo
        config = grpo.config
        self._directory = Path(config.output_dir)
        self._writes = grpo.learner.world.rank == 0
        if config.notify:
            DependencyMissing.require("apprise", extra="notify", purpose="a notice to an address")
        # An address of apprise may hold a password, so trackers must not show it.
        shown = {name: value for name, value in asdict(config).items() if name != "notify"}
        names = config.report_to if self._writes else ()
        self._file = JsonLines(self._directory / "metrics.jsonl")
        self._trackers = Trackers(names, directory=self._directory, config=shown)
        if self._writes:
            self._file.forget_after(grpo.steps_done)

    def write(self, history: Sequence[dict[str, float]]) -> None:
        """Write the metrics of the last step, and log warnings about it.

        Args:
            history: metrics of the steps so far, the last one included.
        """
        if not self._writes:
            return
        step = self._grpo.steps_done
        finite = {name: value if isfinite(value) else None for name, value in history[-1].items()}
        self._file.write(step, finite)
        self._trackers.log(step, history[-1])
        for warning in early_warnings(history):
            log.warning("step %d: %s", step, warning)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception):
                _tell(self._grpo.config, error, f" after {self._grpo.steps_done} steps")
        finally:
            self._trackers.close()


class JsonLines:
    """A file with one JSON line for each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Append the line of one step."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps above this one, so that a resumed run has each step once."""
        if not self.path.exists():
            return
        kept: list[str] = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):
                continue
        # Replaced as a whole, because a kill in the middle of writing would lose the metrics of the run.
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(self.path)


@contextmanager
def told_of_failure(config: GRPOConfig) -> Generator[None]:
    """Send a notice of an error that ends the run in this context, such as a missing model."""
    try:
        yield
    except Exception as error:
        _tell(config, error)
        raise


def _tell(config: GRPOConfig, error: Exception, when: str = "") -> None:
    """Send one notice of an error that ended the run to its addresses, if it has any and was not told yet."""
    if not config.notify or any(getattr(one, _TOLD, False) for one in (error, error.__cause__)):
        return
    from agentenv.runs.notify import Notice, Notifier, through_apprise  # loaded here, because few runs notify

    directory = Path(config.output_dir)
    # The wait is long, because loading apprise's services takes seconds on a busy machine.
    notifier = Notifier(through_apprise(config.notify), directory=directory / "notices", wait_s=60.0)
    notifier.tell(Notice.of(f"training run {directory.name}{when}", error), once_for=_launch())
    notifier.wait()
    setattr(error, _TOLD, True)


def _launch() -> str:
    """Return an id that the processes of one launch share, and that no later launch has."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    shared = "-".join(filter(None, map(os.environ.get, names)))
    return shared or f"{os.getpid()}-{time.time_ns()}"
