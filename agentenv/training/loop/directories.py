"""Replace a directory as a whole, so that a kill at any moment leaves the old or the new one complete.

The new directory is written as `.NAME.partial` and synced to the disk. Then the old one becomes `.NAME.old`,
the new one gets the name, and the old one is deleted. Between the two renames only `.NAME.old` is complete;
`find_whole` finds it, and the next `replace_whole` or `remove_stale` gives it the name again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["find_whole", "partial_of", "remove_stale", "replace_whole"]


def replace_whole(path: Path, fill: Callable[[Path], None]) -> None:
    """Write a directory, which replaces an older one of the same name.

    Args:
        path: the directory.
        fill: writes the contents into the directory that it gets. If it fails, the older one stays.

    Raises:
        OSError: The directory cannot be written.
    """
    partial, old = partial_of(path), _old(path)
    _settle(path)
    try:
        partial.mkdir(parents=True)
        fill(partial)
        for file in (*partial.rglob("*"), partial):
            _sync(file)
        if path.is_dir() and not path.is_symlink():
            path.replace(old)
        partial.replace(path)
        _sync(path.parent)
    except Exception:
        _settle(path)  # a partial directory would also take space on a full disk
        raise
    shutil.rmtree(old, ignore_errors=True)


def find_whole(path: Path) -> Path:
    """Return the directory; if a kill left it without its name, return where it lies."""
    old = _old(path)
    return old if old.is_dir() and not path.exists() else path


def remove_stale(directory: Path, pattern: str) -> None:
    """Clean up what kills left of the directories whose names match the pattern.

    Only the process that writes these directories may do this.
    """
    for left in [*directory.glob(f".{pattern}.partial"), *directory.glob(f".{pattern}.old")]:
        _settle(left.with_name(left.stem.removeprefix(".")))


def _settle(path: Path) -> None:
    """Remove a partial directory, and give a complete one that was moved away its name again."""
    shutil.rmtree(partial_of(path), ignore_errors=True)
    old = _old(path)
    if old.is_dir():
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.replace(path)


def partial_of(path: Path) -> Path:
    """Return where `replace_whole` writes a directory before it gets its name."""
    return path.with_name(f".{path.name}.partial")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
