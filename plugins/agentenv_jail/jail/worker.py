"""A worker: a trusted init that forks one child after another, each for one job.

The init enforces a child's deadline and memory limit, gets its exit code from the kernel, ends processes
that a job left running, and writes the verdict to a socket that no child has. Each child starts as a copy of
the init, so the init must not learn anything that a job wrote. If a job has left anything in its directories,
or if anything went wrong, the worker ends with the job.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from typing import Any, NoReturn

from . import child, kernel, landlock, usage
from .child import JOB, NOBODY, START, Cell
from .files import collect, remove_tree
from .kernel import prctl
from .messages import send_descriptors
from .places import Places, make, mount_own, seal_proc
from .preload import UID
from .watch import Watch, plain

__all__ = ["run"]

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_MAX_JOBS = 1_000
"""Number of jobs after which a worker ends, so that anything that the kernel keeps of them ends too."""
_INLINE_BYTES = 60_000
_OWN = 64
"""Descriptors with this number or a higher one belong to the init, not to its children."""


def run(config: dict[str, Any], job: int, status: int) -> NoReturn:
    """Run the init; never returns."""
    try:
        status, start = _descriptors(job, status)
        worker = _Worker(config, status, start)
        while worker.serve():
            pass
        worker.end()
    except BaseException as error:  # noqa: BLE001 - the boundary: the host is told by the socket
        os.write(status, b'{"failed": "%s"}\n' % plain(f"{type(error).__name__}: {error}").encode())
    finally:
        os._exit(0)


def _descriptors(job: int, status: int) -> tuple[int, int]:
    """Move a child's descriptors to fixed numbers; return the init's own for status and start messages."""
    start_read, start_write = os.pipe()
    own = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _OWN) for fd in (job, status, start_read, start_write)]
    os.dup2(own[0], JOB, inheritable=False)
    os.dup2(own[3], START, inheritable=False)
    os.close(own[0])
    os.close(own[3])
    kernel.close_range(START + 1, _OWN - 1)
    os.set_blocking(own[2], False)
    return own[1], own[2]


class _Worker:
    """The state of an init."""

    def __init__(self, config: dict[str, Any], status: int, start: int) -> None:
        self.config = config
        self.status = socket.socket(fileno=status)
        self.start = start
        self.namespaces: bool = config["tier"] == "namespace"
        self.jobs = 0
        self.child = 0
        self.stopped = False
        self.owner = NOBODY if not self.namespaces and os.geteuid() == 0 else -1
        if self.namespaces:
            if os.getpid() != 1:
                raise OSError("the init must be the first process of its namespace")
            if config["abi"] < landlock.SCOPED:
                kernel.unshare(kernel.CLONE_NEWNET)  # nothing else keeps abstract sockets of neighbours apart
            paths = mount_own(config["limits"], UID if config["mapped"] else 0)
            user_namespace = _user_namespace(mapped=bool(config["mapped"]))
        else:
            signal.signal(signal.SIGTERM, lambda _number, _frame: self.stop())
            paths = make(config["base"], os.geteuid() if self.owner == -1 else self.owner)
            user_namespace = -1
        self.places = Places(paths)
        proc = landlock.open_path("/proc")
        if self.namespaces and not config["abi"]:
            seal_proc()
        self.cell = Cell(user_namespace, _ruleset(config, paths), proc, paths[0], paths[1])
        if not self.namespaces:
            usage.become(self.owner)
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # a change of the user clears this setting
            if os.getppid() != config["zygote"]:
                raise OSError("the zygote has ended")
        prctl(_PR_SET_DUMPABLE, 0)
        self.out, self.err = self.pipes(b"r")

    def pipes(self, message: bytes) -> tuple[int, int]:
        """Create the next child's pipes and send their reading ends to the host, with a message."""
        out, err = os.pipe(), os.pipe()
        send_descriptors(self.status, message, [out[0], err[0]])
        os.close(out[0])
        os.close(err[0])
        return out[1], err[1]

    def serve(self) -> bool:
        """Run one job; return whether to run another one."""
        pid = os.fork()
        if pid == 0:
            child.run(self.config, self.cell, self.out, self.err)
        self.child = pid
        if self.stopped:
            self.stop()
        os.close(self.out)
        os.close(self.err)
        folder = "" if self.namespaces else os.path.dirname(self.cell.home)
        watch = Watch(pid, self.start, folder, self.status)
        watch.run()
        self.child = 0
        self.jobs += 1
        is_clean = watch.is_over and self.places.untouched(watch.started)
        if is_clean and not self.stopped and self.jobs < _MAX_JOBS:
            self.out, self.err = self.pipes(watch.verdict() + b', "files": [], "files_complete": true}\n')
            return True
        self.report(watch)
        return False

    def stop(self) -> None:
        """End the job; the worker ends after it."""
        self.stopped = True
        if self.child:
            os.kill(self.child, signal.SIGKILL)

    def report(self, watch: Watch) -> None:
        """Send the worker's last verdict, with the files that the job left."""
        if self.stopped:
            watch.reason = watch.reason or "stopped"
        files, complete = collect(self.cell.home, self.config["limits"]["collect_bytes"])
        listed = [f'["{name.encode(errors="surrogateescape").hex()}", {len(data)}]' for name, data in files]
        line = f', "files": [{", ".join(listed)}], "files_complete": {"true" if complete else "false"}}}\n'
        head = watch.verdict() + line.encode()
        contents = b"".join(data for _, data in files)
        if len(head) + len(contents) <= _INLINE_BYTES:
            self.status.send(head + contents)
            return
        with open(os.memfd_create("verdict", os.MFD_CLOEXEC), "wb") as memory:
            memory.write(head + contents)
            memory.flush()
            os.lseek(memory.fileno(), 0, os.SEEK_SET)
            send_descriptors(self.status, b"m", [memory.fileno()])

    def end(self) -> None:
        """Remove the worker's directories if they are on disk."""
        if not self.namespaces:
            if self.owner != -1:
                os.seteuid(0)
            remove_tree(os.path.dirname(self.cell.home))


def _user_namespace(*, mapped: bool) -> int:
    """Return a user namespace for the children, so that the kernel counts their processes separately."""
    if mapped:
        os.setgroups([])
    ready, go = os.pipe(), os.pipe()
    helper = kernel.fork()
    if helper == 0:
        try:
            if mapped:
                os.setresgid(UID, UID, UID)
                os.setresuid(UID, UID, UID)
            prctl(_PR_SET_DUMPABLE, 1)
            kernel.unshare(kernel.CLONE_NEWUSER)
            outer = UID if mapped else 0
            kernel.write("/proc/self/setgroups", b"deny")
            kernel.write("/proc/self/uid_map", f"{UID} {outer} 1".encode())
            kernel.write("/proc/self/gid_map", f"{UID} {outer} 1".encode())
            os.write(ready[1], b"x")
            os.close(go[1])
            os.read(go[0], 1)
        finally:
            os._exit(0)
    os.close(ready[1])
    if not os.read(ready[0], 1):
        raise OSError("a user namespace for the code cannot be created")
    low = os.open(f"/proc/{helper}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    own = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _OWN)
    for fd in (low, ready[0], *go):
        os.close(fd)
    os.waitpid(helper, 0)
    return own


def _ruleset(config: dict[str, Any], writable: list[str]) -> int:
    """Return the Landlock ruleset for the children; -1 if the kernel has no Landlock."""
    if not config["abi"]:
        return -1
    rules: list[tuple[int, int]] = list(config["rules"])
    opened = [("/dev/null", landlock.WRITE), *((path, landlock.WRITE) for path in writable)]
    if config["tier"] == "namespace":
        # Files in /proc are not readable: mountinfo names the folders of the host that are shown here.
        opened += [(f"/{name}", landlock.READ) for name in os.listdir("/") if name != "proc"]
        opened.append(("/", landlock.LIST))
    own = [(landlock.open_path(path), rights) for path, rights in opened]
    low = landlock.new_ruleset(rules + own, config["abi"])
    for fd, _ in own:
        os.close(fd)
    high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _OWN)
    os.close(low)
    return high
