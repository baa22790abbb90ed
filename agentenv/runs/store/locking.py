"""A lock that lets only one process write a run directory.

The operating system holds the lock, so it is released even when the process is killed. Whoever may open the
file can hold the lock, so only its owner may; others are told by the kernel who holds it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from agentenv.core.errors import StoreError
from agentenv.core.files import open_regular

__all__ = ["is_locked", "lock", "unlock"]

_NAME = "run.lock"
_KERNELS = Path("/proc/locks")


def _try_lock(handle: int, *, shared: bool = False) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def lock(directory: Path) -> int:
    """Take the lock of a run directory and return its handle.

    Raises:
        StoreError: Another process writes the run, or the directory cannot be written.
    """
    path = directory / _NAME
    try:
        handle = open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
        path.chmod(0o600)  # one that an earlier version made
    except OSError as error:
        raise StoreError(
            f"cannot write the run directory {directory}: {error.strerror or error}",
            remedy="choose another directory with --runs-dir",
        ) from error
    if not _try_lock(handle):
        os.close(handle)
        raise StoreError(
            f"run {directory.name} is being written by another process",
            remedy="wait for that process to end, or stop it",
        )
    return handle


def unlock(handle: int) -> None:
    """Release the lock."""
    os.close(handle)


def is_locked(directory: Path) -> bool:
    """Return whether another process, or another writer in this process, holds the lock.

    Under Linux whoever may read the run sees it, also where it is another user's.
    """
    path = directory / _NAME
    try:
        handle = open_regular(path)
    except PermissionError:
        return _is_held(path)
    except OSError:
        return False
    try:
        return not _try_lock(handle, shared=True)
    finally:
        os.close(handle)


def _is_held(path: Path) -> bool:
    """Return whether the kernel knows of a lock of a file that this user may not open; Linux alone tells."""
    try:
        inode = f":{path.stat().st_ino}"
        return any(line.split()[-3].endswith(inode) for line in _KERNELS.read_text().splitlines())
    except (OSError, IndexError):
        return False
