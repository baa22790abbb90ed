"""Watch one child of the init: enforce its limits, end processes that it left, and report the verdict."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import socket
import time

from . import usage
from .messages import BEGUN, GO_ON, STOP

__all__ = ["Watch", "plain"]

_TICK_S = 0.1
_FINE_TICK_S = 0.01
"""Seconds between two looks if no file system limits the code, which can write some 20 MB meanwhile."""
_SHARE = 4
"""A look that takes long is followed by a wait of this many times as long."""
_CLEAR_S = 5.0
_CPU_SIGNALS = (-signal.SIGXCPU, -signal.SIGKILL)
"""Ends by which the kernel holds the limit of processor time. The code can send them to itself, so only the
time that it used tells which it was."""
_CPU_ROUNDING = 1.05


class Watch:
    """The init's knowledge about one child.

    Args:
        child: Process id of the child.
        start: Descriptor from which the init reads that a job has started.
        place: Directory of the worker in the Landlock tier; empty in the namespace tier.
        orders: Socket by which the host has the child stopped and continued.
    """

    def __init__(self, child: int, start: int, place: str, orders: socket.socket) -> None:
        self.child = child
        self.start = start
        self.place = place
        self.orders = orders
        self.is_stopped = False
        self.tick_s = _FINE_TICK_S if place else _TICK_S
        self.worked_s = 0.0
        self.started = 0.0
        self.duration_s = 0.0
        self.deadline = math.inf
        self.memory_bytes = 0.0
        self.disk_bytes = 0.0
        self.cpu_s = 0.0
        self.threads = 0.0
        self.file_bytes = 0.0
        self.reason = ""
        self.failed = ""
        self.ended: tuple[int, resource.struct_rusage] | None = None
        self.is_cleared = False

    @property
    def is_over(self) -> bool:
        """True if a job has ended and none of its processes runs any more; never true for a session."""
        return self.started > 0 and self.is_cleared and math.isfinite(self.deadline)

    def run(self) -> None:
        """Wait until the child has ended, end it at a limit, and end all processes that it started."""
        handle = os.pidfd_open(self.child)
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.register(self.start, select.POLLIN)
        poller.register(self.orders, select.POLLIN)
        while True:
            wait_s = None
            if self.started and not self.is_stopped:
                wait_s = min(self.tick_s, max(0.0, self.deadline - time.monotonic()))
            events = dict(poller.poll(None if wait_s is None else wait_s * 1000 + 1))
            if self.start in events or handle in events:
                self._listen()
            if handle in events:
                break
            if self.orders.fileno() in events and not self._follow():
                poller.unregister(self.orders)  # the host has gone, which ends the worker by other ways
            self.reap()
            self.check()
        os.close(handle)
        self.duration_s = time.monotonic() - self.started if self.started else 0.0
        # The child must be reaped first, because it alone tells how the execution ended.
        self.reap()
        self.is_cleared = self.clear()

    def _listen(self) -> None:
        """Read the child's message that the job has begun; the child is still trusted at that moment."""
        try:
            message = os.read(self.start, 4096)
        except BlockingIOError:
            return
        if message.startswith(b"!"):
            self.failed = message[1:].decode(errors="replace")
        else:
            _, self.started, limit_s, self.memory_bytes, self.disk_bytes, *rest = BEGUN.unpack(message)
            self.cpu_s, self.threads, self.file_bytes = rest
            self.deadline = self.started + limit_s

    def _follow(self) -> bool:
        """Stop the session between its steps, or let it go on; return False if no order will follow."""
        # Only the last order counts. If the one to stop and the next one to go on were both late, the session
        # has begun its step already, and what its code has stopped itself by now must stay so.
        last = GO_ON if not self.is_stopped else STOP
        with contextlib.suppress(BlockingIOError):
            while order := self.orders.recv(1, socket.MSG_DONTWAIT):
                last = order
            return False
        if (last == STOP) != self.is_stopped:
            self.is_stopped = last == STOP
            # All at once, so that none is left that could continue the others.
            everything = self.child if self.place else -1
            with contextlib.suppress(ProcessLookupError):
                os.kill(everything, signal.SIGSTOP if self.is_stopped else signal.SIGCONT)
        return True

    def reap(self) -> None:
        """Collect the exit status of ended processes; orphans of the child become children of the init."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, spent = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.child:
                    self.ended = (status, spent)

    def check(self) -> None:
        """End the execution if it has exceeded its time, memory, disk or thread limit."""
        if time.monotonic() >= self.deadline:
            self.kill("timeout")
        elif self.started and not self.place:
            self._check_memory()
        elif self.started and (worked_s := usage.processor_s(self.child)) != self.worked_s:
            self.worked_s = worked_s  # a process that did nothing since the last look needs no other one
            began = time.monotonic()
            self._check_memory()
            self._check_place()
            self.tick_s = max(_FINE_TICK_S, _SHARE * (time.monotonic() - began))

    def _check_memory(self) -> None:
        # The exact figure counts shared pages once and costs milliseconds, so it is read only when the cheap
        # one is too high.
        if self._memory(precise=False) > self.memory_bytes and self._memory(precise=True) > self.memory_bytes:
            self.kill("memory")

    def _check_place(self) -> None:
        """Hold the limits that nothing else holds without namespaces."""
        if usage.threads(self.child) > self.threads:
            self.kill("processes")
        held = usage.disk(self.place, self.disk_bytes)
        held += usage.hidden(self.child, self.place, self.file_bytes)
        if held > self.disk_bytes:
            self.kill("disk")

    def kill(self, reason: str) -> None:
        """End the child and, in a pid namespace, everything that it started."""
        self.reason = self.reason or reason
        with contextlib.suppress(ProcessLookupError):
            # In a pid namespace -1 reaches all processes but the init itself, also those that hide from their
            # parent.
            if not self.place:
                os.kill(-1, signal.SIGKILL)
            elif self.ended is None:
                os.kill(self.child, signal.SIGKILL)

    def clear(self) -> bool:
        """End all processes that the child left; return whether none is left.

        No process is left when the init has no children, because an orphan becomes a child of the init.
        """
        deadline = time.monotonic() + _CLEAR_S
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid:
                continue
            # Again each time: a process may fork between the signal and its death.
            self.kill("")
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)

    def _memory(self, *, precise: bool) -> int:
        if self.place:
            return usage.resident(self.child, precise=precise)
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return sum(usage.resident(pid, precise=precise) for pid in pids)

    def verdict(self) -> bytes:
        """Return the verdict as a JSON object without its closing brace.

        The text is written without `json`, because the encoder would touch many pages of memory that are
        shared with the zygote, and the kernel would have to copy each of them.
        """
        code, spent = self.ended or (0, None)
        cpu_s = spent.ru_utime + spent.ru_stime if spent else 0.0
        rss = spent.ru_maxrss * 1024 if spent else 0
        exit_code = os.waitstatus_to_exitcode(code)
        if exit_code in _CPU_SIGNALS and 0 < self.cpu_s <= cpu_s * _CPU_ROUNDING:
            self.reason = self.reason or "cpu"
        failed = f', "failed": "{plain(self.failed)}"' if self.failed else ""
        return (
            f'{{"exit": {exit_code}, "reason": "{self.reason}", '
            f'"duration_s": {self.duration_s!r}, "started": {"true" if self.started else "false"}, '
            f'"cpu_s": {cpu_s!r}, "max_rss_bytes": {rss}{failed}'
        ).encode()


def plain(text: str) -> str:
    """Return the text with all characters that JSON must escape replaced."""
    letters = (letter if letter.isprintable() and letter not in '"\\' else " " for letter in text)
    return "".join(letters).encode(errors="replace").decode()
