"""The host's side of the jail: start the zygote, keep workers ready and replace lost workers.

The zygote is a process in the jail that forks workers. Everything in this module runs on one event loop. A
worker runs one job after another, each in a new child process. It ends if a job has left anything in its
directories, or if something went wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Literal, TypeAlias

from agentenv.core import SandboxCrashed, SandboxUnavailable, UsageError, logger
from agentenv.sandbox import SandboxLimits
from agentenv_jail.jail import landlock
from agentenv_jail.jail.files import remove_tree
from agentenv_jail.jail.launch import BOOT, FLAGS
from agentenv_jail.layout import JAIL_CODE, JailLayout

__all__ = ["MAX_MESSAGE_BYTES", "Pool", "Tier", "Worker"]

Tier: TypeAlias = Literal["namespace", "landlock"]

_log = logger("agentenv.jail")
MAX_MESSAGE_BYTES = 1 << 16
"""Largest message of an init; larger contents are sent in a memory file."""
_START_S = 30.0
_BREATH_S = 0.05
"""Seconds before a worker that ended without a job is replaced, because the next one may end as well."""
_MAX_RESTARTS = 3


@dataclass(slots=True, eq=False)
class Worker:
    """An init in the jail, its parked child, and the host's ends of their channels."""

    # Invariant: `out` and `err` are the pipes of the child that waits for a job, and -1 while a job runs.

    job: socket.socket
    status: socket.socket
    init: int
    """File descriptor (pidfd) of the init process."""
    tier: Tier
    out: int = -1
    err: int = -1
    listener: Callable[[bytes, list[int]], None] | None = None
    """Function that is called with the verdict on the running job and the descriptors sent with it; the
    verdict is b"" if the worker ended without one."""

    def take_pipes(self) -> tuple[int, int]:
        """Return the child's stdout and stderr; the caller closes them."""
        pipes, self.out, self.err = (self.out, self.err), -1, -1
        return pipes

    def order(self, what: bytes) -> None:
        """Send an order of `jail.messages` to the init; an init that has ended gets none."""
        with contextlib.suppress(OSError):
            self.status.send(what)

    def kill(self) -> None:
        """End the execution and the init. Without a pid namespace the init itself has to end its child."""
        if self.init != -1:
            number = signal.SIGKILL if self.tier == "namespace" else signal.SIGTERM
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.init, number)

    def close(self) -> None:
        """Close all descriptors. An init whose child still waits for a job then ends."""
        self.job.close()
        self.status.close()
        for fd in (self.out, self.err, self.init):
            if fd != -1:
                os.close(fd)
        self.out = self.err = self.init = -1


class Pool:
    """A zygote and the workers that it has forked in advance.

    Args:
        size: Number of workers kept ready.
        most: Largest number of idle workers kept after more than `size` were needed.
    """

    # Invariant: `_ready` and `_kept` are subsets of `_workers`. A worker in neither of them is busy, or its
    # first child does not wait for a job yet.
    # Invariant: `_asked` counts the requests for a worker that the zygote has not answered yet.

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
        self._removing: Thread | None = None
        self._workers: set[Worker] = set()
        self._kept: set[Worker] = set()
        self._ready: deque[Worker] = deque()
        self._asked = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._restarts = 0
        self._starting = asyncio.Lock()
        self.closed = False

    async def start(self) -> None:
        """Build the jail and request the first workers.

        Raises:
            SandboxUnavailable: The tier does not work on this machine; the message says why.
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
            # A thread cannot be cancelled, so a cancelled caller waits for it; no zygote is left running.
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
        """Start the zygote and wait until it is ready; this blocks for about 50 ms."""
        # SEQPACKET keeps the boundaries of messages and reports when the other end is closed.
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
            answer = json.loads(
                near.recv(1 << 16) or b'{"failed": "the jail ended while it was being built"}'
            )
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
            raise SandboxUnavailable(f"{self.tier}: the interpreter cannot be started: {error}") from error

    def _configuration(self, control: int) -> dict[str, object]:
        if self.tier == "namespace":
            paths = self._layout.for_namespaces()
        else:
            # The init finds the code's files in /proc by their real paths.
            self._base = os.path.realpath(tempfile.mkdtemp(prefix="agentenv-sandbox-"))
            Path(self._base).chmod(0o711)
            paths = self._layout.for_landlock(self._base)
        return {
            **paths,
            "tier": self.tier,
            "control": control,
            "limits": self.limits.as_dict(),
            "preload": self._preload,
            "abi": landlock.abi(),
        }

    def _ask(self, count: int) -> None:
        """Request workers from the zygote."""
        if self._control is None:
            return
        try:
            for _ in range(count):
                self._control.send(b"s")
                self._asked += 1
        except BlockingIOError:
            return  # the socket is full of requests, so further ones would not help
        except OSError:
            self._lost()

    def _on_control(self) -> None:
        """Receive the workers that the zygote has sent."""
        while self._control is not None:
            try:
                message, fds = _received(self._control, 4096, 4)
            except BlockingIOError:
                return
            except OSError:
                message, fds = b"", []
            if not message:
                self._lost()
                return
            self._asked -= 1
            if message == b"w" and fds:
                self._welcome(fds)
            else:
                # The machine is probably short of processes or memory; an immediate request would spin.
                said = "no open files are left" if message == b"w" else message.decode(errors="replace")
                _log.warning("sandbox: no worker: %s", said)
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
        """Receive a message of an init: the verdict on its last job, the pipes of its next child, or both."""
        try:
            message, fds = _received(worker.status, MAX_MESSAGE_BYTES, 2)
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
        """Remove a worker that has ended or is not needed; a new one is requested if too few are left."""
        if worker in self._workers:
            self._leave(worker)
            worker.close()
            assert self._loop is not None
            self._loop.call_later(in_s, self._replenish)

    def _replenish(self) -> None:
        # Kept workers belong to sessions and do not come back, so they do not count here.
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
        """Clean up after a zygote that has ended; the next request starts another one."""
        _log.warning("sandbox: the zygote has ended")
        self._end_zygote()
        while self._waiting:
            self._wake()

    async def keep(self) -> Worker:
        """Return a worker that the caller keeps until it passes it to `discard`."""
        worker = await self.take()
        self._kept.add(worker)
        self._replenish()
        return worker

    async def take(self) -> Worker:
        """Return a worker whose child waits for a job; after the job the worker returns to the pool.

        Raises:
            SandboxCrashed: The zygote ended several times in a row.
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
                if self._process is None:  # the request has shown that the zygote is gone
                    continue
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                # This waiter was woken for a worker and cancelled too, so the next waiter gets the worker.
                if waiter.done() and not waiter.cancelled():
                    self._wake()
                raise

    def _end_zygote(self) -> None:
        """End the zygote and everything in the jail, and remove its files."""
        if self._control is not None:
            if self._loop is not None and not self._loop.is_closed() and self._control.fileno() != -1:
                self._loop.remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        # All workers are removed before any listener is called, because a listener may request another
        # worker at once.
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
            # What code left may be thousands of levels deep or hold very many links, for which recursion and
            # the event loop have no room. A thread that is no daemon is waited for at the program's end.
            self._removing = Thread(target=remove_tree, args=(self._base,), name="sandbox removal")
            self._removing.start()
            self._base = ""

    async def removed(self) -> None:
        """Wait until the directories of a closed pool are gone."""
        if self._removing is not None:
            await asyncio.to_thread(self._removing.join)

    def close(self) -> None:
        """End the zygote and all workers; may be called twice."""
        self.closed = True
        self._end_zygote()
        while self._waiting:
            self._wake()


def _received(way: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Return a message and its descriptors: all of them, or none where this process has no room for all."""
    message, descriptors, flags, _ = socket.recv_fds(way, size, most)
    if flags & socket.MSG_CTRUNC:
        # Those that did find room cannot be told apart: a pipe might be read as the file of a verdict.
        for descriptor in descriptors:
            os.close(descriptor)
        return message, []
    return message, descriptors
