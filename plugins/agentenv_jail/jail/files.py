"""Collect the files that an execution left in its working directory, and remove the directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

__all__ = ["collect", "remove_tree", "walk"]

_MAX_ENTRIES = 1_000


def collect(top: str, max_bytes: int) -> tuple[list[tuple[str, bytes]], bool]:
    """Return the regular files in a directory, and whether the list is complete.

    No process may use the directory any more. Links are not followed.
    """
    files: list[tuple[str, bytes]] = []
    room, complete = max_bytes, True
    for seen, path in enumerate(walk(top)):
        if seen >= _MAX_ENTRIES:
            return files, False
        try:
            content = _read(path, room)
        except OSError:
            complete = False
            continue
        if content is not None:
            room -= len(content)
            files.append((path[len(top) + 1 :], content))
    return files, complete


def walk(top: str) -> Iterator[str]:
    """Yield all paths below a directory, without recursion and without following links.

    Entries whose path is longer than the kernel allows are left out.
    """
    folders = [top]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    yield entry.path
        except OSError:
            continue


def _read(path: str, room: int) -> bytes | None:
    """Return the content of a regular file; None if the path is anything else.

    Raises:
        OSError: The file cannot be read or is larger than `room`.
    """
    known = os.lstat(path)
    if not stat.S_ISREG(known.st_mode):
        return None
    if known.st_size > room:
        raise OSError("too large")
    # The code is gone, but what it left may be of any kind: a link must not lead out of the directory, and
    # opening a pipe must not wait for its other end.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with open(fd, "rb", closefd=False) as file:
            return file.read(room)
    finally:
        os.close(fd)


def remove_tree(top: str) -> None:
    """Remove a directory that no process uses any more, even if it is very deep.

    Inner directories are first moved up into `top`, so that no path becomes too long.
    """
    try:
        base = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    moved = 0
    try:
        while names := os.listdir(base):
            for name in names:
                moved = _remove(name, base, moved)
        os.rmdir(top)
    except OSError:
        pass
    finally:
        os.close(base)


def _remove(name: str, base: int, moved: int) -> int:
    if not stat.S_ISDIR(os.lstat(name, dir_fd=base).st_mode):
        os.unlink(name, dir_fd=base)
        return moved
    # The code may have taken its owner's rights away, without which nothing in it could be listed.
    os.chmod(name, 0o700, dir_fd=base)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=base)
    try:
        for entry in os.listdir(inner):
            if stat.S_ISDIR(os.lstat(entry, dir_fd=inner).st_mode):
                os.chmod(entry, 0o700, dir_fd=inner)  # moving a directory writes to it
                os.rename(entry, f".removed.{moved}.{os.getpid()}", src_dir_fd=inner, dst_dir_fd=base)
                moved += 1
            else:
                os.unlink(entry, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=base)
    return moved
