"""The directories that an execution may write to, and the check whether it did."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from . import kernel
from .kernel import mount

__all__ = ["Places", "make", "mount_own", "seal_proc"]

_NOSUID, _NODEV, _NOEXEC, _NOATIME = 2, 4, 8, 1024
_RDONLY, _REMOUNT, _BIND = 1, 32, 4096
_GET_FLAGS = 0x80086601
_TICK_S = 0.02
"""Seconds that are longer than the resolution of file times, which is the kernel's tick of at most 10 ms."""

_Look = tuple[int, ...]


class Places:
    """Empty directories, with their state when they were new."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self._new = [_look(path) for path in paths]
        self._marks = [_marks(path) for path in paths]
        self._made = time.monotonic()

    def untouched(self, since: float) -> bool:
        """Return whether nothing was written since a moment of `time.monotonic()`.

        Every change in a directory, or to it, updates its ctime, which no process can set. If the directory
        was changed within a tick of its creation, its ctime could be the same. In that case the extended
        attributes and flags are compared too, because the other values in `_look` would not show them.
        """
        if [_look(path) for path in self.paths] != self._new:
            return False
        return since - self._made > _TICK_S or [_marks(path) for path in self.paths] == self._marks


def _look(path: str) -> _Look:
    known = os.lstat(path)
    return (
        known.st_ino,
        known.st_dev,
        known.st_mode,
        known.st_uid,
        known.st_nlink,
        known.st_size,
        known.st_mtime_ns,
        known.st_ctime_ns,
    )


def _marks(path: str) -> list[object]:
    """Return the flags and the names of extended attributes of a directory."""
    marks: list[object] = []
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for ask in (lambda: fcntl.ioctl(fd, _GET_FLAGS, bytes(8)), lambda: os.listxattr(fd)):
        with contextlib.suppress(OSError):  # some file systems do not have them
            marks.append(ask())
    os.close(fd)
    return marks


def mount_own(limits: dict[str, int], owner: int) -> list[str]:
    """Mount separate file systems for this worker; return the directories that may be written to."""
    kernel.unshare(kernel.CLONE_NEWNS)
    shape = f"nr_inodes={limits['max_inodes']},mode=0700,uid={owner},gid={owner}"
    sizes = {"/work": limits["work_bytes"], "/tmp": limits["work_bytes"], "/dev/shm": limits["shm_bytes"]}
    for target, size in sizes.items():
        mount("tmpfs", target, "tmpfs", _NOSUID | _NODEV | _NOATIME, f"size={size},{shape}")
    mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC, "hidepid=2,subset=pid")
    return list(sizes)


def seal_proc() -> None:
    """Cover /proc by a copy that cannot be written to; needed only if there is no Landlock."""
    mount("/proc", "/proc", "", _BIND)
    mount("", "/proc", "", _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | _NOEXEC)


def make(base: str, owner: int) -> list[str]:
    """Create the directories of a worker for the Landlock tier, which has no mounts of its own."""
    folder = f"{base}/{os.urandom(8).hex()}"
    os.mkdir(folder, 0o755)
    paths = [f"{folder}/work", f"{folder}/tmp"]
    for path in paths:
        os.mkdir(path, 0o700)
        if owner != os.geteuid():
            os.chown(path, owner, owner)
    return paths
