"""The run of `agentenv train`, also where torchrun started several processes of it."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import typer

from agentenv.core.trajectory import Trajectory
from agentenv.runs.store.codec import decode_trajectory, dumps, encode_trajectory
from agentenv.runs.store.runinfo import RunStatus
from agentenv.runs.store.writer import RunWriter

__all__ = ["Plan", "SharedRun"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the first process of a launch tells the others."""

    path: Path
    config: Any
    limits: Any
    names: Mapping[str, float]
    checkpoint: Path | None = None
    runner: Any = None
    env: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the environments."""


class SharedRun:
    """A run that the first process of a launch opens and writes; the others send it their episodes."""

    def __init__(self, open_run: Callable[[], tuple[RunWriter, Plan]]) -> None:
        self._writer: RunWriter | None = None
        self._launch: Any = None
        self._failure = ""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self._launch = importlib.import_module("agentenv.train.loop.launch").Launch()
            # torchrun ends all processes when one fails: what was sent by then is still written.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        self.is_first = self._launch is None or self._launch.is_first

        def opened() -> Plan:
            self._writer, plan = open_run()
            return plan

        plan = opened() if self._launch is None else self._launch.agree_on(opened)
        if plan is None:
            raise typer.Exit(1)  # the first process says why
        self.plan: Plan = plan
        self.id = plan.path.resolve().name

    def append(self, trajectory: Trajectory) -> None:
        """Write a finished episode."""
        if self._writer is not None:
            self._writer.append(trajectory)
        else:
            self._launch.send(("append", _line(trajectory), {}))

    def annotate(self, trajectory: Trajectory, note: Mapping[str, object]) -> None:
        """Write what the trainer made of an episode."""
        if self._writer is not None:
            self._writer.annotate(trajectory, **note)
        else:
            self._launch.send(("annotate", _line(trajectory), dict(note)))

    def keep_texts(self, backend: Any) -> None:
        """Write the text of each token id that occurs."""
        if self._writer is not None:
            self._writer.keep_texts(backend)

    def collect(self) -> None:
        """Write what the other processes have sent."""
        if self._launch is None or self._writer is None:
            return
        for what, value, note in self._launch.collect():
            if what == "fail":
                self._failure = self._failure or value
            else:
                getattr(self._writer, what)(decode_trajectory(json.loads(value)), **note)

    def close(self, status: RunStatus) -> None:
        """Note how the run ended."""
        self.collect()
        if self._writer is not None:
            self._writer.close(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is None:
            if isinstance(error, Exception):
                with suppress(RuntimeError):  # the first process may be gone, and the cause of it
                    self._launch.send(("fail", f"{type(error).__name__}: {error}", {}))
            return
        with self._writer:
            self.collect()
            if self._failure:
                self._writer.close(RunStatus.FAILED, self._failure)
            elif error is not None:
                self._writer.__exit__(kind, error, traceback)


def _line(trajectory: Trajectory) -> str:
    """Return an episode as it is stored: a pickle cannot hold all that an environment may put into it."""
    return dumps(encode_trajectory(trajectory))
