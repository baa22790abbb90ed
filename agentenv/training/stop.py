"""The request to end the run of this process, which its steps and micro-batches read.

A handler that raises ends nothing for sure: Python drops what is raised while C calls back, as in a finaliser
after a backward pass. So the handlers of signals note the request here and cancel the coroutine that waits,
and the training itself raises KeyboardInterrupt at the next place where it can stop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["StopRequest", "stop"]


class StopRequest:
    """Whether this process was told to end its run; signals belong to the process, and so does this."""

    def __init__(self) -> None:
        self.writing = threading.RLock()
        """Held while weights or a checkpoint are written, half of which would be of no use."""
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
        self.clear()

    def clear(self) -> None:
        """Forget the request, because the run has ended."""
        self.asked = self.due = False

    def ask(self) -> None:
        """Ask for the end: steps of a warm-up end it, and what is awaited is cancelled."""
        again, self.asked = self.asked, True
        for loop, task in () if again else self._waiting:
            with suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(task.cancel)

    def before_step(self) -> None:
        """Raise KeyboardInterrupt if the end was asked for."""
        if self.asked:
            raise KeyboardInterrupt

    def before_pass(self) -> None:
        """Raise KeyboardInterrupt if the step under way is to be broken off, too."""
        if self.due:
            raise KeyboardInterrupt

    @contextmanager
    def cancels(self) -> Generator[None]:
        """Let the request cancel the current task in this context, as KeyboardInterrupt.

        When all processes are told to end, the first one to do so breaks the connections of the others, which
        must report an interruption, too.
        """
        task = asyncio.current_task()
        assert task is not None
        held = (asyncio.get_running_loop(), task)
        self._waiting.append(held)
        try:
            self.before_step()  # after the task is known, so that no request falls in between
            yield
        except (asyncio.CancelledError, RuntimeError):
            self.before_step()
            raise
        finally:
            self._waiting.remove(held)


stop = StopRequest()
"""The request of this process."""
