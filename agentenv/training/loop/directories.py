"""The directories of checkpoints: replaced as a whole, found, and deleted when there are enough.

A kill at any moment leaves the old or the new one complete.

The new directory is written as `.NAME.partial` and synced to the disk. Then the old one becomes `.NAME.old`,
the new one gets the name, and the old one is deleted. Between the two renames only `.NAME.old` is complete;
`find_whole` finds it, and the next `replace_whole` or `prune_checkpoints` gives it the name again.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from agentenv.core.errors import UsageError
from agentenv.core.files import make_directory

__all__ = ["find_whole", "last_checkpoint", "partial_of", "prune_checkpoints", "replace_whole", "step_of"]

STATE = "trainer_state.json"
"""File of a checkpoint, written last."""
_NAME = re.compile(r"step-(\d+)|\.step-(\d+)\.old")


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


def step_of(checkpoint: Path) -> int:
    """Return the step N of a checkpoint named `step-N`."""
    named = _NAME.fullmatch(checkpoint.name)
    if named is None:
        raise UsageError(f"{checkpoint} is not a checkpoint of a run: its name is not step-N")
    return int(named[1] or named[2])


def last_checkpoint(run: Path) -> Path | None:
    """Return the newest complete checkpoint in a run's directory; None if there is none.

    Raises:
        StoreError: The directory of the checkpoints is a link, through which others would be replaced.
    """
    if (directory := run / "checkpoints").exists():
        make_directory(directory)
    complete = [path for path in _numbered(directory) if (path / STATE).is_file()]
    return max(complete, key=step_of, default=None)


def prune_checkpoints(directory: Path, keep: int | None, *, newest: int) -> None:
    """Delete what kills left, and the oldest `step-N` directories but `keep`, at least one; None keeps all.

    Checkpoints of steps after `newest`, which an earlier run left, stay and do not count. Only the
    process that writes the checkpoints may do this.
    """
    for left in [*directory.glob(".step-*.partial"), *directory.glob(".step-*.old")]:
        _settle(left.with_name(left.stem.removeprefix(".")))
    if keep is None:
        return
    paths = sorted((path for path in _numbered(directory) if step_of(path) <= newest), key=step_of)
    for old in paths[: max(0, len(paths) - max(1, keep))]:
        shutil.rmtree(old, ignore_errors=True)


def _numbered(directory: Path) -> list[Path]:
    """Return the checkpoints of a run, also one that a kill left without its name."""
    steps = {step_of(path) for path in directory.glob("*") if _NAME.fullmatch(path.name)}
    return [find_whole(directory / f"step-{step}") for step in steps]


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
