"""The init's watch over its child: deadline, memory, leftovers, and the verdict."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import time
from typing import Any

from .files import collect, remove_tree, walk
from .program import BEGUN

__all__ = ["watch"]

_TICK_S = 0.1
_MAX_INODES = 8192


class _Watch:
    """What the init knows of its child."""

    def __init__(self, child: int, *, namespaces: bool, place: str) -> None:
        self.child = child
        self.namespaces = namespaces
        self.place = place
        self.started = 0.0
        self.deadline = math.inf
        self.memory_bytes = 0.0
        self.disk_bytes = 0.0
        self.reason = ""
        self.ended: tuple[int, resource.struct_rusage] | None = None

    def begin(self, message: bytes) -> None:
        """Take the child's word that the job has begun; it is not untrusted before that."""
        _, self.started, limit_s, self.memory_bytes, self.disk_bytes = BEGUN.unpack(message)
        self.deadline = self.started + limit_s

    def reap(self) -> None:
        """Collect whoever ended; orphans of the child become ours."""
        while self.ended is None:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
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
        elif self.place and _disk(self.place, self.disk_bytes) > self.disk_bytes:
            self.kill("disk")

    def kill(self, reason: str) -> None:
        """End everything that the child started, and the child."""
        self.reason = self.reason or reason
        try:
            if self.namespaces:
                os.kill(-1, signal.SIGKILL)
            elif self.ended is None:
                os.kill(self.child, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _memory(self, *, precise: bool) -> int:
        if not self.namespaces:
            return _resident(self.child, precise=precise)
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return sum(_resident(pid, precise=precise) for pid in pids)


def _resident(pid: int, *, precise: bool) -> int:
    """Return bytes held by a process: anonymous and shared memory.

    The quick count takes a shared page once for each process; the precise one divides it.
    """
    names = (b"Pss_Anon:", b"Pss_Shmem:") if precise else (b"RssAnon:", b"RssShmem:")
    try:
        with open(f"/proc/{pid}/{'smaps_rollup' if precise else 'status'}", "rb") as file:
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


def watch(config: dict[str, Any], child: int, start: int, status: int, place: str) -> None:
    """Wait until the child ends or must end, then write the verdict and what it left."""
    self = _Watch(child, namespaces=not place, place=place)
    if place:
        signal.signal(signal.SIGTERM, lambda *_: self.kill("stopped"))
    handle = os.pidfd_open(child)
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    poller.register(start, select.POLLIN)
    failed = ""
    while True:
        wait_s = None
        if self.started:
            wait_s = min(_TICK_S, max(0.0, self.deadline - time.monotonic()))
        events = dict(poller.poll(None if wait_s is None else wait_s * 1000 + 1))
        if start in events:
            message = os.read(start, 4096)  # one message, from before the code runs
            poller.unregister(start)
            if message.startswith(b"!"):
                failed = message[1:].decode(errors="replace")
            elif message:
                self.begin(message)
        if handle in events:
            break
        self.reap()
        self.check()
    _finish(config, self, status, failed)


def _finish(config: dict[str, Any], self: _Watch, status: int, failed: str) -> None:
    duration_s = time.monotonic() - self.started if self.started else 0.0
    self.reap()
    code, usage = self.ended or (0, None)
    self.kill("")
    cpu_s = usage.ru_utime + usage.ru_stime if usage else 0.0
    rss = usage.ru_maxrss * 1024 if usage else 0
    # JSON by hand: the encoder would touch many pages of memory, and each has to be copied first
    exit_code = os.waitstatus_to_exitcode(code)
    verdict = (
        f'{{"exit": {exit_code}, "reason": "{self.reason}", "duration_s": {duration_s!r}, '
        f'"started": {"true" if self.started else "false"}, "cpu_s": {cpu_s!r}, "max_rss_bytes": {rss}'
    )
    if failed:
        verdict += f', "failed": "{_plain(failed)}"'
    contents: list[bytes] = []
    if self.started:
        limits: dict[str, int] = config["limits"]
        home = f"{self.place}/work" if self.place else "/work"
        files, complete = collect(home, limits["collect_bytes"])
        listed = [f'["{name.encode(errors="surrogateescape").hex()}", {len(data)}]' for name, data in files]
        verdict += f', "files": [{", ".join(listed)}], "files_complete": {"true" if complete else "false"}'
        contents = [data for _, data in files]
    with open(status, "wb") as pipe:
        pipe.write(b"".join([verdict.encode(), b"}\n", *contents]))
    if self.place:
        remove_tree(self.place)


def _plain(text: str) -> str:
    """Return a text that needs no quoting in JSON."""
    return "".join(letter if letter.isprintable() and letter not in '"\\' else " " for letter in text)
