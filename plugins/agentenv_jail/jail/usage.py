"""What a process uses of memory, disk and threads, read from /proc and from its directories."""

from __future__ import annotations

import errno
import math
import os
import stat
import time
from collections.abc import Iterator

from . import kernel

__all__ = ["become", "check_measurable", "disk", "hidden", "processor_s", "resident", "threads"]

_MAX_INODES = 8192
_PR_SET_DUMPABLE = 4


def resident(pid: int, *, precise: bool) -> int:
    """Return the bytes of anonymous and shared memory that a process uses.

    The quick count includes a shared page once for each process. The precise count divides the page among
    them, but not every process allows it to be read.
    """
    if precise and (held := _sum(f"/proc/{pid}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:"))):
        return held
    names = (b"RssAnon:", b"RssShmem:")
    if held := _sum(f"/proc/{pid}/status", names):
        return held
    # If the first thread of a process has ended, only the other threads show its memory.
    return max((_sum(f"{task}/status", names) for task in _tasks(pid)), default=0)


def _sum(path: str, names: tuple[bytes, ...]) -> int:
    try:
        with open(path, "rb") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(names))
    except (OSError, IndexError, ValueError):
        return 0


def _tasks(pid: int) -> list[str]:
    try:
        return [f"/proc/{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def threads(pid: int) -> int:
    """Return the number of threads of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(b"Threads:")), 0)
    except OSError:
        return 0


def processor_s(pid: int) -> float:
    """Return the processor time of a process; nan, which equals nothing, if it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the kernel's number for the clock of another process
    except OSError:
        return math.nan


def disk(top: str, enough: float) -> float:
    """Return the bytes of files under a directory; more than `enough` if they cannot all be seen.

    A directory that its owner may not list, or whose path is too long, could hold any number of files.
    """
    total, entries, folders = 0.0, 0, [top]
    linked: set[int] = set()
    while folders:
        try:
            with os.scandir(folders.pop()) as found:
                for entry in found:
                    entries += 1
                    if entries > _MAX_INODES or total > enough:
                        return enough + 1
                    total += _size(entry, folders, linked)
        except (FileNotFoundError, NotADirectoryError):  # removed since
            continue
        except OSError:
            return enough + 1
    return total


def _size(entry: os.DirEntry[str], folders: list[str], linked: set[int]) -> int:
    try:
        known = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return 0
    if stat.S_ISDIR(known.st_mode):
        folders.append(entry.path)
    elif known.st_nlink > 1:
        if known.st_ino in linked:
            return 0
        linked.add(known.st_ino)
    return known.st_blocks * 512


def hidden(pid: int, top: str, max_file_bytes: float) -> float:
    """Return the bytes of removed files that a process still holds; infinity if that cannot be seen.

    A removed file takes up space while it is open or mapped. All threads of the process must share one table
    of open files. A mapping does not tell the size of its file, so it counts as the largest possible file.

    Args:
        pid: The process, whose user must be the one of this process.
        top: Directory of the worker, in which all files of the process are.
        max_file_bytes: Largest possible size of a file.
    """
    for task in _tasks(pid):
        try:
            held = dict(_removed_files(task))
            for inode in _removed_mappings(task, top):
                held.setdefault(inode, max_file_bytes)
            return sum(held.values())
        except PermissionError:
            # The kernel gives a thread that ends to root; any other one does not let itself be seen.
            if _sum(f"{task}/status", (b"VmSize:",)):
                return math.inf
        except OSError:
            continue
    return 0


def _removed_files(task: str) -> Iterator[tuple[int, float]]:
    for name in os.listdir(f"{task}/fd"):
        try:
            known = os.stat(f"{task}/fd/{name}")
        except FileNotFoundError:  # closed since
            continue
        if known.st_nlink == 0 and stat.S_ISREG(known.st_mode):
            yield known.st_ino, known.st_blocks * 512


def _removed_mappings(task: str, top: str) -> Iterator[int]:
    start = os.fsencode(top)
    with open(f"{task}/maps", "rb") as file:
        for line in file:
            if line.endswith(b" (deleted)\n"):
                parts = line.split(None, 5)
                if parts[5].startswith(start):
                    yield int(parts[4])


def become(owner: int) -> None:
    """Act as the user of the children, with root kept as the saved user; -1 changes nothing.

    Root may not look at the open files of all processes, for example in a container.
    """
    if owner != -1:
        os.setresgid(owner, owner, 0)
        os.setresuid(owner, owner, 0)


def check_measurable(owner: int) -> None:
    """Check that an init can see what a child uses.

    Args:
        owner: User of the child if this process is root; -1 if both have the same user.

    Raises:
        OSError: It cannot, so the limits of disk and threads could not be held.
    """
    pid = kernel.fork()
    if pid == 0:
        try:
            become(owner)
            os._exit(0 if _sees_a_child(owner) else 1)
        finally:
            os._exit(1)
    if os.waitpid(pid, 0)[1] != 0:
        reason = "the open files of a process cannot be seen in /proc, so its use of disk cannot be limited"
        raise OSError(errno.EACCES, reason)


def _sees_a_child(owner: int) -> bool:
    ready, told = os.pipe()
    go, stop = os.pipe()
    pid = kernel.fork()
    if pid == 0:
        try:
            if owner != -1:
                os.setresgid(owner, owner, owner)
                os.setresuid(owner, owner, owner)
            kernel.prctl(_PR_SET_DUMPABLE, 1)  # as in every child
            os.write(told, b"x")
            os.close(stop)
            os.read(go, 1)
        finally:
            os._exit(0)
    os.close(told)
    os.close(go)
    os.read(ready, 1)
    seen = hidden(pid, "/", 0) < math.inf and threads(pid) == 1
    os.close(stop)
    os.waitpid(pid, 0)
    return seen
