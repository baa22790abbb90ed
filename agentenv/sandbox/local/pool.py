"""The host's side of the jail: start the zygote, keep workers ready, replace what is lost.

Everything here runs on one event loop. A worker takes one job after another, each in a new child; it
ends when a job has left anything in its directories, and whenever something went wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from agentenv.core.errors import SandboxCrashed, SandboxUnavailable, UsageError
from agentenv.sandbox.local.jail.launch import BOOT, FLAGS
from agentenv.sandbox.local.layout import JAIL_CODE, JailLayout
from agentenv.sandbox.request import SandboxLimits

__all__ = ["MAX_MESSAGE_BYTES", "Pool", "Tier", "Worker"]

Tier: TypeAlias = Literal["namespace", "landlock"]

_log = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 1 << 16
"""Of an init; what is larger comes in a memory file."""
_START_S = 30.0
_BREATH_S = 0.05
"""Before a worker that went without a job is replaced: it may go again."""
_MAX_RESTARTS = 3


@dataclass(slots=True, eq=False)
class Worker:
    """An init in the jail, its parked child, and the host's ends of their channels."""

    # Invariant: `out` and `err` are those of the child that waits for a job; -1 while one runs.

    job: socket.socket
    status: socket.socket
    init: int
    """Handle on the init process."""
    tier: Tier
    out: int = -1
    err: int = -1
    listener: Callable[[bytes, list[int]], None] | None = None
    """Told the verdict on the job in flight, with descriptors that come along; b"" if there is none."""

    def take_pipes(self) -> tuple[int, int]:
        """Return the child's stdout and stderr; the caller closes them."""
        pipes, self.out, self.err = (self.out, self.err), -1, -1
        return pipes

    def kill(self) -> None:
        """End the execution and the init; without a pid namespace the init has to do it."""
        if self.init != -1:
            number = signal.SIGKILL if self.tier == "namespace" else signal.SIGTERM
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.init, number)

    def close(self) -> None:
        """Close every descriptor; an init whose child still waits for a job ends by that."""
        self.job.close()
        self.status.close()
        for fd in (self.out, self.err, self.init):
            if fd != -1:
                os.close(fd)
        self.out = self.err = self.init = -1


class Pool:
    """A zygote, and the workers that it has forked ahead.

    Args:
        size: Workers kept ready.
        most: Workers kept when there was a need for more than `size`.
    """

    # Invariant: `_ready` and `_kept` are parts of `_workers`; a worker in neither is busy, or has not parked
    # its first child yet.
    # Invariant: `_asked` counts the workers asked for that the zygote has not answered for, well or badly.

    def __init__(
        self,
        *,
        size: int,
        most: int,
        limits: SandboxLimits,
        tier: Tier,
        layout: JailLayout,
        preload: Sequence[str],
    ) -> None:
        self.size = size
        self.limits = limits
        self.tier: Tier = tier
        self._most = most
        self._layout = layout
        self._preload = tuple(preload)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._base = ""
        self._workers: set[Worker] = set()
        self._kept: set[Worker] = set()
        self._ready: deque[Worker] = deque()
        self._asked = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._restarts = 0
        self._starting = asyncio.Lock()
        self.closed = False

    async def start(self) -> None:
        """Build the jail and ask for the first workers.

        Raises:
            SandboxUnavailable: The tier cannot be had here; the message has the reason.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not None and loop is not self._loop:
            raise UsageError(
                "a sandbox belongs to the event loop that started it", remedy="make one for each loop"
            )
        self._loop = loop
        async with self._starting:
            if self._control is not None or self.closed:
                return
            # A thread cannot be cancelled: whoever is cancelled here waits for it, so that no zygote is left.
            launch = asyncio.ensure_future(asyncio.to_thread(self._launch))
            try:
                await asyncio.shield(launch)
            except asyncio.CancelledError:
                await asyncio.wait([launch])
                self._end_zygote()
                raise
            assert self._control is not None
            self._control.setblocking(False)
            loop.add_reader(self._control.fileno(), self._on_control)
            self._ask(self.size)

    def _launch(self) -> None:
        """Start the zygote and wait until it is ready; blocks for some 50 ms."""
        # SEQPACKET keeps the bounds of messages, and says when the other end has gone.
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with far:
                self._process = self._execute(far.fileno())
        except BaseException:
            near.close()
            raise
        self._control = near
        near.settimeout(_START_S)
        try:
            answer = json.loads(near.recv(1 << 16) or b'{"failed": "the jail ended while it was built"}')
        except TimeoutError:
            answer = {"failed": f"the jail was not ready after {_START_S:g} s"}
        if "failed" in answer:
            self._end_zygote()
            raise SandboxUnavailable(f"{self.tier}: {answer['failed']}")

    def _execute(self, control: int) -> subprocess.Popen[bytes]:
        config = self._configuration(control)
        boot = BOOT.format("launch")
        arguments = [self._layout.python, *FLAGS, "-c", boot, str(JAIL_CODE.parent), json.dumps(config)]
        try:
            return subprocess.Popen(  # noqa: S603 - our own code in a chosen interpreter
                [*arguments, str(os.getpid())],
                pass_fds=[control],
                env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxUnavailable(f"{self.tier}: the interpreter does not start: {error}") from error

    def _configuration(self, control: int) -> dict[str, object]:
        if self.tier == "namespace":
            place = self._layout.for_namespaces()
        else:
            self._base = tempfile.mkdtemp(prefix="agentenv-sandbox-")
            Path(self._base).chmod(0o711)
            place = self._layout.for_landlock(self._base)
        limits = self.limits.as_dict()
        return {**place, "tier": self.tier, "control": control, "limits": limits, "preload": self._preload}

    def _ask(self, count: int) -> None:
        """Ask the zygote for workers."""
        if self._control is None:
            return
        try:
            for _ in range(count):
                self._control.send(b"s")
                self._asked += 1
        except BlockingIOError:
            return  # so many are asked for that more would not come sooner
        except OSError:
            self._lost()

    def _on_control(self) -> None:
        """Take in the workers that the zygote sent."""
        while self._control is not None:
            try:
                message, fds, _, _ = socket.recv_fds(self._control, 4096, 4)
            except BlockingIOError:
                return
            except OSError:
                message, fds = b"", []
            if not message:
                self._lost()
                return
            self._asked -= 1
            if message == b"w" and len(fds) == 3:
                self._welcome(fds)
            else:
                # Most likely out of processes or memory for the moment: asking at once would spin.
                _log.warning("sandbox: no worker: %s", message.decode(errors="replace"))
                assert self._loop is not None
                self._loop.call_later(_BREATH_S, self._replenish)

    def _welcome(self, fds: list[int]) -> None:
        assert self._loop is not None
        job, status = socket.socket(fileno=fds[0]), socket.socket(fileno=fds[1])
        job.setblocking(False)
        status.setblocking(False)
        worker = Worker(job, status, fds[2], tier=self.tier)
        self._workers.add(worker)
        self._loop.add_reader(status.fileno(), self._on_status, worker)

    def _on_status(self, worker: Worker) -> None:
        """Take a message of an init: its child is parked, or what became of a job."""
        try:
            message, fds, _, _ = socket.recv_fds(worker.status, MAX_MESSAGE_BYTES, 2)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        listener, worker.listener = worker.listener, None
        if listener is not None:
            listener(message, fds if len(fds) == 1 else [])
        if len(fds) == 2:  # the next child's pipes come with the verdict on the last one
            self._park(worker, fds)
        else:
            self.discard(worker, in_s=_BREATH_S if listener is None else 0.0)

    def _park(self, worker: Worker, pipes: list[int]) -> None:
        worker.out, worker.err = pipes
        for fd in pipes:
            os.set_blocking(fd, False)
        self._restarts = 0
        if len(self._ready) >= self._most:
            self.discard(worker)
            return
        self._ready.append(worker)
        self._wake()

    def discard(self, worker: Worker, in_s: float = 0.0) -> None:
        """Let go of a worker that has ended or is not wanted; it is replaced if it is missed."""
        if worker in self._workers:
            self._leave(worker)
            worker.close()
            assert self._loop is not None
            self._loop.call_later(in_s, self._replenish)

    def _replenish(self) -> None:
        # Kept workers belong to sessions and do not come back, so they are replaced.
        missing = self.size - (len(self._workers) - len(self._kept))
        self._ask(max(missing, len(self._waiting)) - self._asked)

    def _leave(self, worker: Worker) -> None:
        self._workers.discard(worker)
        self._kept.discard(worker)
        if worker in self._ready:
            self._ready.remove(worker)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(worker.status.fileno())

    def _wake(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _lost(self) -> None:
        """Forget a zygote that has gone; the next request starts another."""
        _log.warning("sandbox: the zygote has gone")
        self._end_zygote()
        while self._waiting:
            self._wake()

    async def keep(self) -> Worker:
        """Return a worker that stays with the caller, who gives it to `discard` in the end."""
        worker = await self.take()
        self._kept.add(worker)
        self._replenish()
        return worker

    async def take(self) -> Worker:
        """Return a worker with a parked child; the worker comes back by itself after the job.

        Raises:
            SandboxCrashed: The zygote cannot be kept alive.
        """
        while True:
            if self.closed:
                raise UsageError("the sandbox is closed", remedy="make a new one")
            if self._control is None:
                self._restarts += 1
                if self._restarts > _MAX_RESTARTS:
                    self._restarts = 0
                    raise SandboxCrashed(f"the sandbox's zygote ended {_MAX_RESTARTS} times in a row")
                await self.start()
                continue
            if self._ready:
                return self._ready.popleft()
            if self._asked <= len(self._waiting):
                self._ask(1)
                if self._process is None:  # asking has shown that the zygote is gone
                    continue
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                # Woken and cancelled at once: the worker that it was woken for is the next one's.
                if waiter.done() and not waiter.cancelled():
                    self._wake()
                raise

    def _end_zygote(self) -> None:
        """End the zygote and everything in the jail, and remove what is on disk."""
        if self._control is not None:
            if self._loop is not None and not self._loop.is_closed() and self._control.fileno() != -1:
                self._loop.remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        # First out of the books and then told: a listener may ask for another worker at once.
        lost = list(self._workers)
        for worker in lost:
            self._leave(worker)
        self._asked = 0
        self._end_process()
        for worker in lost:
            worker.close()
            listener, worker.listener = worker.listener, None
            if listener is not None:
                listener(b"", [])

    def _end_process(self) -> None:
        if self._process is not None:
            if self.tier == "namespace":
                self._process.kill()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._base:
            shutil.rmtree(self._base, ignore_errors=True)
            self._base = ""

    def close(self) -> None:
        """End everything; may be called twice."""
        self.closed = True
        self._end_zygote()
        while self._waiting:
            self._wake()
