"""How a run ends early: on SIGTERM, on an error, or when another process of the launch has gone.

SIGTERM (SLURM, Kubernetes, spot machines, `kill`) ends a run as Ctrl-C does: after the step under way, with a
checkpoint. Whoever sends it kills soon after, torchrun and Kubernetes after 30 seconds. So a step that takes
longer than `GRACE_S` is broken off, and the checkpoint is that of the step before it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from agentenv.core.errors import TrainingFailed
from agentenv.core.visible import logger
from agentenv.training.trainer import GRPOTrainer

__all__ = ["GRACE_S", "ended_by_sigterm", "lost_process", "save_what_is_whole"]

log = logger(__name__)

GRACE_S = 10.0
"""Seconds that a step may still take after SIGTERM."""
RETRY_S = 0.1
FIRST_S = 5.0
"""Seconds for which the other processes leave it to the first one to save the run."""


@contextmanager
def ended_by_sigterm(trainer: GRPOTrainer) -> Generator[Callable[[], None]]:
    """Let SIGTERM end the run in this context as Ctrl-C does; only the main thread can.

    A program that has no handler of its own ends with exit code 143 afterwards.

    Yields:
        A function that lets nothing interrupt the process any more, for what saves and closes the run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    timers: list[threading.Timer] = []
    came = asked = over = False

    def settle() -> None:
        nonlocal over
        over = True
        for timer in timers:
            timer.cancel()

    def again(seconds: float) -> None:
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)))
        timers[-1].daemon = True
        timers[-1].start()

    def end(_number: int, frame: FrameType | None) -> None:
        nonlocal came, asked
        came = True
        if over:
            return
        # The first time the run is cancelled, which waits for the step. Later times break it off, but not
        # while it writes: neither half of the weights nor half of a checkpoint is of use.
        interrupts = import_module("agentenv.core.interrupts")
        cancels = callable(signal.getsignal(signal.SIGINT)) or interrupts.unheard
        gentle, asked = not asked and cancels, True
        if not gentle and trainer.is_writing:
            again(RETRY_S)
            return
        # A step beside a stream is computed in a thread of its own, which nothing breaks off.
        if gentle and not trainer.config.plays_ahead:
            again(GRACE_S)
        elif not gentle:
            settle()  # an interrupt in what follows this one would end the process without a checkpoint
        interrupts.ctrl_c()(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield settle
    finally:
        settle()
        signal.signal(signal.SIGTERM, before)
    if came and before is signal.SIG_DFL:
        raise SystemExit(143)


def save_what_is_whole(trainer: GRPOTrainer, cause: BaseException) -> None:
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


def _save(trainer: GRPOTrainer) -> Path:
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
