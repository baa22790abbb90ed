"""The init's watch over one child: deadline, memory, leftovers, and the verdict."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import time

from .files import walk
from .program import BEGUN

__all__ = ["Watch", "plain"]

_TICK_S = 0.1
_CLEAR_S = 5.0
_MAX_INODES = 8192


class Watch:
    """What the init knows of its child.

    Args:
        child: Its process id.
        start: Where it says that a job starts.
        place: The worker's directory where there are no namespaces, else empty.
    """

    def __init__(self, child: int, start: int, place: str) -> None:
        self.child = child
        self.start = start
        self.place = place
        self.started = 0.0
        self.duration_s = 0.0
        self.deadline = math.inf
        self.memory_bytes = 0.0
        self.disk_bytes = 0.0
        self.reason = ""
        self.failed = ""
        self.ended: tuple[int, resource.struct_rusage] | None = None
        self.is_cleared = False

    @property
    def is_over(self) -> bool:
        """True if a job ran to its end and nothing of it runs any more; never true of a session."""
        return self.started > 0 and self.is_cleared and math.isfinite(self.deadline)

    def run(self) -> None:
        """Wait until the child ends or must end, and nothing that it started runs."""
        handle = os.pidfd_open(self.child)
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.register(self.start, select.POLLIN)
        while True:
            wait_s = None
            if self.started:
                wait_s = min(_TICK_S, max(0.0, self.deadline - time.monotonic()))
            events = dict(poller.poll(None if wait_s is None else wait_s * 1000 + 1))
            if self.start in events or handle in events:
                self._listen()
            if handle in events:
                break
            self.reap()
            self.check()
        os.close(handle)
        self.duration_s = time.monotonic() - self.started if self.started else 0.0
        self.reap()
        self.is_cleared = self.clear()

    def _listen(self) -> None:
        """Take the child's word that the job has begun; it is not untrusted before that."""
        try:
            message = os.read(self.start, 4096)
        except BlockingIOError:
            return
        if message.startswith(b"!"):
            self.failed = message[1:].decode(errors="replace")
        else:
            _, self.started, limit_s, self.memory_bytes, self.disk_bytes = BEGUN.unpack(message)
            self.deadline = self.started + limit_s

    def reap(self) -> None:
        """Collect whoever ended; orphans of the child become ours."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.child:
                    self.ended = (status, usage)

    def check(self) -> None:
        """End the execution if it is over its time or its memory."""
        if time.monotonic() >= self.deadline:
            self.kill("timeout")
        elif self.memory_bytes and self._memory(precise=False) > self.memory_bytes:
            if self._memory(precise=True) > self.memory_bytes:
                self.kill("memory")
        elif self.place and self.started and _disk(self.place, self.disk_bytes) > self.disk_bytes:
            self.kill("disk")

    def kill(self, reason: str) -> None:
        """End everything that the child started, and the child."""
        self.reason = self.reason or reason
        with contextlib.suppress(ProcessLookupError):
            if not self.place:
                os.kill(-1, signal.SIGKILL)
            elif self.ended is None:
                os.kill(self.child, signal.SIGKILL)

    def clear(self) -> bool:
        """End what the child left running; return whether nothing is left.

        The namespace is empty when the init has no children: whoever loses its parent becomes its.
        """
        deadline = time.monotonic() + _CLEAR_S
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid:
                continue
            self.kill("")
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)

    def _memory(self, *, precise: bool) -> int:
        if self.place:
            return _resident(self.child, precise=precise)
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return sum(_resident(pid, precise=precise) for pid in pids)

    def verdict(self) -> bytes:
        """Return the verdict: an object in JSON without its closing brace.

        By hand: the encoder would touch many pages of memory, and each has to be copied first.
        """
        code, usage = self.ended or (0, None)
        cpu_s = usage.ru_utime + usage.ru_stime if usage else 0.0
        rss = usage.ru_maxrss * 1024 if usage else 0
        failed = f', "failed": "{plain(self.failed)}"' if self.failed else ""
        return (
            f'{{"exit": {os.waitstatus_to_exitcode(code)}, "reason": "{self.reason}", '
            f'"duration_s": {self.duration_s!r}, "started": {"true" if self.started else "false"}, '
            f'"cpu_s": {cpu_s!r}, "max_rss_bytes": {rss}{failed}'
        ).encode()


def plain(text: str) -> str:
    """Return a text that needs no quoting in JSON."""
    letters = (letter if letter.isprintable() and letter not in '"\\' else " " for letter in text)
    return "".join(letters).encode(errors="replace").decode()


def _resident(pid: int, *, precise: bool) -> int:
    """Return bytes held by a process: anonymous and shared memory.

    The quick count takes a shared page once for each process; the precise one divides it, where the
    process lets itself be looked at so closely.
    """
    if precise and (held := _sum(f"/proc/{pid}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:"))):
        return held
    names = (b"RssAnon:", b"RssShmem:")
    if held := _sum(f"/proc/{pid}/status", names):
        return held
    try:  # a process whose first thread has left shows its memory in the others only
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    return max((_sum(f"/proc/{pid}/task/{thread}/status", names) for thread in threads), default=0)


def _sum(path: str, names: tuple[bytes, ...]) -> int:
    try:
        with open(path, "rb") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(names))
    except (OSError, IndexError, ValueError):
        return 0


def _disk(top: str, enough: float) -> float:
    """Return the bytes in files under a directory, or more than `enough` for too many entries."""
    total = 0
    for entries, path in enumerate(walk(top)):
        if entries > _MAX_INODES or total > enough:
            return enough + 1
        with contextlib.suppress(OSError):
            total += os.lstat(path).st_blocks * 512
    return total
