"""The run directory of a training, which several processes of torchrun can share.

The first process opens and writes the run. The others send it their episodes and the trainer's notes on
them, and it writes after every step what it has received.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from agentenv.core.trajectory import Trajectory
from agentenv.runs.store.codec import decode_trajectory, dumps, encode_trajectory
from agentenv.runs.store.runinfo import RunStatus
from agentenv.runs.store.summary import Encoded
from agentenv.runs.store.writer import RunWriter
from agentenv.training.loop.launch import Launch, LaunchFailed

__all__ = ["SharedRun"]


class _Plan(Protocol):
    @property
    def path(self) -> Path: ...


P = TypeVar("P", bound=_Plan)


class SharedRun(Generic[P]):
    """A run that the first process of a launch opens and writes; a context around the training.

    Args:
        open_run: called in the first process; it returns the run's writer and the plan for all processes.

    Raises:
        LaunchFailed: In the other processes, if the first one could not open the run.
    """

    def __init__(self, open_run: Callable[[], tuple[RunWriter, P]]) -> None:
        self._writer: RunWriter | None = None
        self._failure = ""
        self._launch = Launch() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None

        def opened() -> P:
            self._writer, plan = open_run()
            return plan

        plan = opened() if self._launch is None else self._launch.agree_on(opened)
        if plan is None:
            raise LaunchFailed(
                "the first process could not open the run", remedy="read the error of that process"
            )
        self.plan: P = plan
        self.id = plan.path.resolve().name

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run."""
        return self._writer is not None

    def append(self, trajectory: Trajectory, encoded: Encoded | None = None) -> None:
        """Write a finished episode, which a worker may have encoded already."""
        if self._writer is not None:
            self._writer.append(trajectory, encoded)
        else:
            self._send("append", _line(trajectory) if encoded is None else encoded.line.decode(), {})

    def annotate(self, trajectory: Trajectory, note: Mapping[str, object]) -> None:
        """Write the trainer's note on an episode."""
        if self._writer is not None:
            self._writer.annotate(trajectory, **note)
        else:
            self._send("annotate", _line(trajectory), dict(note))

    def log_workers(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write how this process and its workers are doing; only those of the first process are kept."""
        if self._writer is not None:
            self._writer.log_workers(rows)

    def log_servers(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write how the engine's servers are doing, as the first process and its workers see them."""
        if self._writer is not None:
            self._writer.log_servers(rows)

    def keep_texts(self, backend: Any, images: Mapping[str, Any]) -> None:
        """Write the text of each token id that occurs, and the settings for images if there are any."""
        if self._writer is not None:
            self._writer.keep_texts(backend, images)

    def collect(self) -> None:
        """Write the episodes and notes that the other processes have sent."""
        if self._launch is None or self._writer is None:
            return
        for what, value, note in self._launch.collect():
            if what == "fail":
                self._failure = self._failure or value
            elif what == "append":
                self._writer.append(decode_trajectory(json.loads(value)))
            else:
                self._writer.annotate(decode_trajectory(json.loads(value)), **note)

    def close(self, status: RunStatus) -> None:
        """Write the final status of the run."""
        self.collect()
        if self._writer is not None:
            self._writer.close(status)

    def _send(self, what: str, value: str, note: dict[str, object]) -> None:
        assert self._launch is not None  # a single process writes directly
        self._launch.send((what, value, note))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is None:
            if isinstance(error, Exception):
                # The first process may have ended, perhaps as the cause of this error.
                with suppress(RuntimeError):
                    self._send("fail", f"{type(error).__name__}: {error}", {})
            return
        with self._writer:
            self.collect()
            if self._failure:
                self._writer.close(RunStatus.FAILED, self._failure)
            elif error is not None:
                self._writer.__exit__(kind, error, traceback)


def _line(trajectory: Trajectory) -> str:
    """Return an episode in its stored form."""
    return dumps(encode_trajectory(trajectory))
