"""The program of a local worker process; see `agentenv.workers.local`.

Arguments are the file descriptors of its socket and of the pipe that ends when the driver ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from contextlib import AsyncExitStack
from typing import Any

from agentenv.core.errors import AgentEnvError
from agentenv.core.faults import class_of, message_of
from agentenv.workers.episode_worker import EpisodeWorker
from agentenv.workers.frames import pickled, read_frame, write_frame
from agentenv.workers.worker import CANCELLED, mark_as_worker

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
GRACE_S = 20.0
"""Time that a worker without a driver has to close its environments."""


def main(arguments: list[str]) -> None:
    """Serve the driver until it closes the worker or ends."""
    fd, pipe = map(int, arguments)
    mark_as_worker()
    if sys.platform == "linux":
        # A worker that somebody stopped would not see the driver's end, and stay for ever.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=_end_with_driver, args=(pipe,), name="driver watch", daemon=True).start()
    try:
        asyncio.run(_serve(socket.socket(fileno=fd)))
    # Only code that was played here has the tasks of this loop, stops it, or sends signals to this session.
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.exit(CANCELLED)
    except RuntimeError as error:
        if "Event loop stopped" not in str(error):
            raise
        sys.exit(CANCELLED)


def _end_with_driver(pipe: int) -> None:
    """Wait for the driver's end, then give the event loop some time to close, then kill the session."""
    os.read(pipe, 1)
    time.sleep(GRACE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    async with AsyncExitStack() as stack:
        opening = await read_frame(reader)
        if opening is None:
            return
        _, key, recipe, name = opening
        try:
            worker = await stack.enter_async_context(EpisodeWorker(recipe, name))
        except BaseException as error:  # noqa: BLE001 - opening imports the author's code; the driver is told
            write_frame(writer, "failed", key, (f"{class_of(error)}: {message_of(error)}", {}))
            await writer.drain()
            return
        write_frame(writer, "opened", key, ("", worker.parts()))
        await _Requests(worker, writer).follow(reader)
    writer.close()


class _Requests:
    """Follows the requests of the driver."""

    def __init__(self, worker: EpisodeWorker, writer: asyncio.StreamWriter) -> None:
        self._worker = worker
        self._writer = writer
        self._playing: set[asyncio.Task[None]] = set()

    async def follow(self, reader: asyncio.StreamReader) -> None:
        """Answer requests until the driver says `close` or ends."""
        while (message := await read_frame(reader)) is not None:
            kind, values = message[0], message[1:]
            if kind == "close":
                return
            if kind == "cancel":
                self._worker.cancel(*values)
            elif kind == "play":
                task = asyncio.create_task(self._play(*values))
                self._playing.add(task)
                task.add_done_callback(self._playing.discard)
                # Thousands of orders may be in the buffer. Episodes that begin one after the other leave the
                # loop free for those that are played; all at once they would keep it busy for seconds.
                await asyncio.sleep(0)
            elif kind == "weights":
                self._worker.expect_weights(*values[1:])
                write_frame(self._writer, "done", values[0], None)
            elif kind == "turns":
                write_frame(self._writer, "done", values[0], self._worker.turns())
            elif kind == "stats":
                write_frame(self._writer, "done", values[0], self._worker.stats())

    async def _play(self, key: int, order: Any) -> None:
        try:
            answer = pickled(("done", key, await self._worker.play(key, order)))
        except Exception as error:  # noqa: BLE001 - a mistake of the caller, which is raised in the driver
            answer = _raised(key, error)
        self._writer.write(answer)


def _raised(key: int, error: Exception) -> bytes:
    """Return the message with which the driver raises an error that was raised here."""
    try:
        return pickled(("raised", key, error))
    except AgentEnvError:
        return pickled(("raised", key, AgentEnvError(f"{class_of(error)}: {message_of(error)}")))


if __name__ == "__main__":
    main(sys.argv[1:])
