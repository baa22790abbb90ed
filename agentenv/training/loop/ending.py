"""How a run ends early: on a signal, on an error, or when another process of the launch has gone.

SIGTERM (SLURM, Kubernetes, spot machines, `kill`) and Ctrl-C end a run after the step under way, with a
checkpoint. Whoever sends SIGTERM kills soon after, torchrun and Kubernetes after 30 seconds. So a step that
takes longer than `GRACE_S` is broken off between two of its passes, and the checkpoint is that of the step
before it. Beside what reads no request, such as a hung function, a thread saves what is whole and ends the
process. A second SIGTERM does not wait for the step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch.distributed as dist

from agentenv.core.errors import TrainingFailed
from agentenv.core.loops import cancelled_within
from agentenv.core.visible import logger
from agentenv.training.learners.torch.world import World
from agentenv.training.stop import stop

__all__ = ["ended_by_signals", "saved_if_it_ends_early"]

log = logger(__name__)

GRACE_S = 10.0
"""Seconds that a step may still take after SIGTERM."""
BREAK_S = 5.0
"""Seconds that a step which is broken off may take to come to the end of a pass."""
LAST_S = 60.0
"""Seconds after a second SIGTERM in which the process has ended, whatever it still writes."""
RETRY_S = 0.1
EXIT_CODE = 128 + signal.SIGTERM
FIRST_S = 5.0
"""Seconds for which the other processes leave it to the first one to save the run."""


class Saves(Protocol):
    """The trainer, as far as its last step is to be saved."""

    learner: Any

    @property
    def world(self) -> World:
        """The processes that train together."""
        ...

    @property
    def steps_done(self) -> int:
        """Number of whole steps."""
        ...

    @property
    def is_saved(self) -> bool:
        """Whether the weights of the last whole step are saved."""
        ...

    @property
    def step_path(self) -> Path:
        """Directory of the checkpoint of the last step, whether it exists or not."""
        ...

    def save_step(self, *, replica: bool = False) -> Path:
        """Write it."""
        ...


class _Signals:
    """The signals that came during a run, and the thread that ends the process if the run does not.

    Args:
        trainer: the training.
        close: closes the run when the process is ended without it.
    """

    def __init__(self, trainer: Saves, close: Callable[[], None]) -> None:
        self._trainer, self._close, self._pid = trainer, close, os.getpid()
        self.terms = 0
        """Number of SIGTERMs. The handlers count and take no lock, because they may interrupt each other."""
        self.settled = False
        """Whether the run has come to its end, which saves and closes it."""
        self._interrupts = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="end of the run", daemon=True)
        self._thread.start()

    def terminate(self, _number: int, _frame: FrameType | None) -> None:
        """Handle SIGTERM."""
        if os.getpid() != self._pid:  # a copy of this process, whose run is none of its own
            os._exit(EXIT_CODE)
        self.terms += 1
        stop.ask()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-C; whoever presses it again does not want to wait."""
        self._interrupts += 1
        stop.ask()
        if self._interrupts > 1:
            stop.due = True
            signal.default_int_handler(number, frame)

    def finish(self) -> None:
        """Watch no more, because the run is over, and forget the request."""
        self._over.set()
        self._thread.join()
        stop.clear()

    def _watch(self) -> None:
        """Break off the step that takes too long after SIGTERM, and end the process if that does not help."""
        first = second = busy = None
        while not self._over.wait(RETRY_S):
            now = time.monotonic()
            if not self.terms:
                continue
            first, busy = first or now, busy or now
            second = second or (now if self.terms > 1 else None)
            if second is not None and now - second > LAST_S:
                os._exit(EXIT_CODE)
            stop.due = stop.due or second is not None or now - first > GRACE_S
            if not stop.writing.acquire(blocking=False):
                busy = now  # a write takes as long as it takes
                continue
            stop.writing.release()
            if second is None and not self.settled and now - busy > GRACE_S + BREAK_S:
                self._leave()
            if second is not None and now - max(busy, second) > BREAK_S:
                self._leave()

    def _leave(self) -> None:
        """Save what is whole and end the process, whatever its other threads do."""
        timer = threading.Timer(LAST_S, os._exit, [EXIT_CODE])
        timer.daemon = True
        timer.start()
        try:
            with stop.writing:  # for good: from here on no other thread changes the weights
                if not self.settled:
                    save_what_is_whole(self._trainer, TimeoutError("the step under way did not end"))
                    self._close()
        finally:
            os._exit(EXIT_CODE)


@contextmanager
def ended_by_signals(
    trainer: Saves, close: Callable[[], None] = lambda: None
) -> Generator[Callable[[], None]]:
    """Let SIGTERM and Ctrl-C end the run in this context by KeyboardInterrupt; only the main thread can.

    A program that has no handler of its own for SIGTERM ends with exit code 143 afterwards.

    Args:
        trainer: the training.
        close: closes the run if the process has to be ended from beside it.

    Yields:
        A function that says that the run has come to its end, and may take its time to save and close.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    signals = _Signals(trainer, close)

    def settle() -> None:
        signals.settled = True

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, signals.terminate)}
    # Where a shell has Ctrl-C ignored, or the program hears it, it stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signals.interrupt)
    try:
        yield settle
    except KeyboardInterrupt:
        if not signals.terms or before[signal.SIGTERM] is not signal.SIG_DFL:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signals.finish()
    if signals.terms and before[signal.SIGTERM] is signal.SIG_DFL:
        raise SystemExit(EXIT_CODE)


@contextmanager
def saved_if_it_ends_early(trainer: Saves, settle: Callable[[], None]) -> Generator[None]:
    """Save the last whole step if the run ends early, whatever ends it.

    Args:
        trainer: the training.
        settle: says that the run has come to its end.

    Raises:
        KeyboardInterrupt: A signal ended the run.
        TrainingFailed: Another process of the launch has gone.
    """
    try:
        yield
        settle()
    except BaseException as cause:
        settle()
        save_what_is_whole(trainer, cause)
        gone = lost_process(cause)
        if stop.asked and (gone or isinstance(cause, asyncio.CancelledError)):
            raise KeyboardInterrupt from cause
        if isinstance(cause, asyncio.CancelledError):
            raise cancelled_within() from cause
        if not gone:
            raise
        raise TrainingFailed(
            f"another process of the launch has ended, and rank {trainer.world.rank} cannot go on",
            remedy="read the error of that process, and resume the run",
        ) from cause


def save_what_is_whole(trainer: Saves, cause: BaseException) -> None:
    """Save the last whole step of a run that ends early, if it can be saved and is not saved yet.

    What cannot be saved is logged and raises nothing, so that the cause stays the error of the run.
    """
    done = trainer.steps_done
    if trainer.is_saved:
        return
    why = ""
    if trainer.learner.torn:
        why = "it was broken off while it wrote the weights"
    elif trainer.world.sharded and not isinstance(cause, (KeyboardInterrupt, TrainingFailed)):
        why = "a sharded model is saved by all processes together, and this one alone has failed"
    if not why:
        try:
            path = _save(trainer)
        except Exception as error:  # noqa: BLE001 - such as a full disk, which must not hide the cause
            why = f"{type(error).__name__}: {error}"
        else:
            log.warning("the run ends early; step %d is saved in %s", done, path)
            return
    log.error("the run ends early, and step %d cannot be saved: %s", done, why)


def _save(trainer: Saves) -> Path:
    """Save the last step; another process than the first one does so if that one does not."""
    world, path = trainer.world, trainer.step_path
    if not world.rank or world.sharded:
        return trainer.save_step()
    for _ in range(int(FIRST_S / RETRY_S)):
        if path.exists():
            return path
        time.sleep(RETRY_S)
    try:  # of the processes that are left, one writes
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f".{path.name}.saver").touch(exist_ok=False)
    except FileExistsError:
        return path
    if (
        dist.is_initialized()
    ):  # transformers saves in the first process of a group only, and this one is broken
        dist.destroy_process_group()
    try:
        return trainer.save_step(replica=True)
    finally:
        path.with_name(f".{path.name}.saver").unlink(missing_ok=True)


def lost_process(error: BaseException) -> bool:
    """Return whether an error says that another process of the launch has gone."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    # gloo raises plain errors, whose texts alone tell.
    told = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in told)
