"""Workers that are processes of this machine.

1. A worker and the driver talk through a pair of connected sockets, which have no name.
2. A worker ends itself when the driver ends, however that happens: a thread of it reads a pipe whose other
   end only the driver holds.
3. A worker leads a session of its own, so that Ctrl-C reaches only the driver, and so that everything that
   the worker started can be killed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from typing import Any

from agentenv.core.errors import UsageError
from agentenv.engine.interface import Completion
from agentenv.workers.episode_worker import Order, OrderKey, Played
from agentenv.workers.frames import read_frame, write_frame
from agentenv.workers.handshake import Handshake
from agentenv.workers.silence import answers, last_answer
from agentenv.workers.worker import CANCELLED, WorkerLost, require_played

__all__ = ["LocalWorker"]

CLOSE_S = 60.0
"""Time limit for a worker to close its environments; it is killed after that."""
EXIT_S = 10.0
"""Time limit for a worker to end after it has closed its connection."""


class LocalWorker:
    """A worker process of this machine; see `agentenv.workers.worker.Worker`.

    Args:
        recipe: JSON text of the recipe.
        name: name of the worker.
        handshake: refuses a worker that plays with something else than this process.
    """

    # Invariant: every request in `_asked` is settled by the answer to it, or by the end of the process.

    def __init__(self, recipe: str, name: str, handshake: Handshake) -> None:
        self.name = name
        self._handshake = handshake
        self._recipe = recipe
        self._keys = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._death_pipe = -1
        self._why = ""

    @property
    def pid(self) -> int | None:
        """Id of the process; None before it is started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and wait until the recipe is open in it; see `Worker.start`."""
        ours, theirs = socket.socketpair()
        pipe, self._death_pipe = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                # -P: a file of the user named as a standard module, such as random.py, must not replace it.
                *(sys.executable, "-P", "-m", "agentenv.workers.local_main"),
                *(str(theirs.fileno()), str(pipe)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # what environments print must not mix with what a command prints
                pass_fds=(theirs.fileno(), pipe),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(pipe)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._listening = asyncio.create_task(self._listen(reader, self._process))
        failure, parts = await self._ask("open", self._recipe, self.name)
        if failure:
            raise UsageError(f"a worker cannot open this run: {failure}")
        self._handshake.require(parts, self.name, "this machine")

    async def play(self, order: Order) -> Played:
        """Play an episode; see `Worker.play`."""
        key, answer = self._request("play", order)
        try:
            return require_played(self, await asyncio.shield(answer))
        except asyncio.CancelledError:
            if self._writer is not None:
                write_frame(self._writer, "cancel", key)
            with contextlib.suppress(WorkerLost):
                played = await last_answer(self, answer)
                if played is not None:
                    return played
            raise

    async def expect_weights(self, version: int, run: str) -> None:
        """Tell the worker's engine which weights its servers have now, and which training pushed them."""
        await self._ask("weights", version, run)

    async def stats(self) -> dict[str, Any]:
        """Return how the worker is doing; see `Worker.stats`."""
        return await self._ask("stats")

    async def turns(self) -> dict[OrderKey, dict[str, Completion]]:
        """Return the completions of long episodes since the last call; see `Worker.turns`."""
        return await self._ask("turns")

    def kill(self, why: str) -> None:
        """End the process at once; see `Worker.kill`."""
        if self._process is not None and self._process.returncode is None:
            self._why = why
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Let the worker close its environments, and end the process and all that it started."""
        if self._process is None:
            self._close_death_pipe()
            return
        if self._process.returncode is None and self._writer is not None and await answers(self):
            write_frame(self._writer, "close")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if self._listening is not None:
            await self._listening
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._close_death_pipe()

    def _close_death_pipe(self) -> None:
        if self._death_pipe >= 0:
            os.close(self._death_pipe)
            self._death_pipe = -1

    def _request(self, kind: str, *values: object) -> tuple[int, asyncio.Future[Any]]:
        """Send a request; return its key and the future of its answer."""
        if self._writer is None or self._listening is None or self._listening.done():
            raise WorkerLost(f"worker {self.name} has ended")
        key = next(self._keys)
        write_frame(self._writer, kind, key, *values)
        answer = self._asked[key] = asyncio.get_running_loop().create_future()
        return key, answer

    async def _ask(self, kind: str, *values: object) -> Any:
        return await self._request(kind, *values)[1]

    async def _listen(self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process) -> None:
        """Settle the requests as their answers arrive, and all that are left when the process ends.

        The process counts as ended when it has exited, too: a process that it forked may keep the socket.
        """
        answers = asyncio.create_task(self._settle(reader))
        exited = asyncio.create_task(process.wait())
        await asyncio.wait({answers, exited}, return_when=asyncio.FIRST_COMPLETED)
        # Answers that the process wrote before it exited are still in the socket; and a process that closes
        # its socket is about to exit, with a status that says why.
        await asyncio.wait({answers, exited}, timeout=1.0 if exited.done() else EXIT_S)
        answers.cancel()
        if not exited.done():
            self._why = self._why or "closed its connection, did not end and was killed"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        status = await exited
        await asyncio.gather(answers, return_exceptions=True)
        # No `await` from here on: a request that came between would never be settled, and `_request` takes
        # them until this task is done.
        how = self._why or _ending(status)
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(WorkerLost(f"worker {self.name} (pid {process.pid}) {how}"))
                answer.exception()  # the caller may be gone

    async def _settle(self, reader: asyncio.StreamReader) -> None:
        while (message := await read_frame(reader)) is not None:
            kind, key, value = message
            answer = self._asked.pop(key, None)
            if answer is None or answer.done():
                continue
            if kind == "raised":
                answer.set_exception(value)
            else:
                answer.set_result(value)


def _ending(status: int) -> str:
    """Return how a process ended, in words."""
    if status == CANCELLED:
        return (
            "ended, because code that it played has stopped its event loop, or has cancelled tasks of its "
            "event loop that it did not make"
        )
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = str(-status)
    hint = " (out of memory, perhaps)" if status == -signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
