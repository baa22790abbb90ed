"""Write the steps of a run to `metrics.jsonl` and trackers, and log warnings, in the first process alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentenv.core.errors import StoreError
from agentenv.core.files import make_directory, open_regular, read_regular, write_regular
from agentenv.core.visible import logger
from agentenv.training.step import GRPO
from agentenv.training.watch.warn import early_warnings

if TYPE_CHECKING:
    from agentenv.training.watch.track import Trackers

__all__ = ["Journal", "JsonLines"]

log = logger(__name__)


class Journal:
    """Writes the steps of one run, as a context around the run.

    Args:
        grpo: the algorithm, whose steps are written.
        about: what trackers keep beside the options.

    Raises:
        DependencyMissing: A tracker is named in the options and not installed.
        StoreError: The run's directory cannot be made.
        UsageError: A tracker is unknown.
    """

    def __init__(self, grpo: GRPO[Any], about: Mapping[str, object]) -> None:
        self._grpo = grpo
        config = grpo.config
        self._directory = Path(config.output_dir)
        self._writes = grpo.learner.world.rank == 0
        self._file = JsonLines(self._directory / "metrics.jsonl")
        self._trackers: Trackers | None = None
        if self._writes and config.report_to:
            from agentenv.training.watch.track import Trackers  # here, because most trainings have none

            told = {**asdict(config), **about}
            self._trackers = Trackers(config.report_to, directory=self._directory, config=told)
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
        if self._trackers is not None:
            self._trackers.log(step, history[-1])
        for warning in early_warnings(history):
            log.warning("step %d: %s", step, warning)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._trackers is not None:
            self._trackers.close()


class JsonLines:
    """A file with one JSON line for each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            make_directory(path.parent)
        except OSError as error:
            raise StoreError(
                f"cannot make the directory {path.parent} of the run: {error.strerror}"
            ) from error

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Append the line of one step."""
        with os.fdopen(open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
            file.write(json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n")

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps above this one, so that a resumed run has each step once."""
        if not self.path.exists():
            return
        kept: list[bytes] = []
        for line in read_regular(self.path).split(b"\n"):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + b"\n")
            except (ValueError, KeyError):
                continue
        # Replaced as a whole, because a kill in the middle of writing would lose the metrics of the run.
        partial = self.path.with_name(f".{self.path.name}.partial")
        write_regular(partial, b"".join(kept))
        partial.replace(self.path)
