"""Remove a directory of files that others wrote."""

from __future__ import annotations

import shutil
from contextlib import suppress
from os import walk
from pathlib import Path

__all__ = ["remove_tree"]


def remove_tree(top: str | Path) -> None:
    """Remove a directory as far as this user may, also if nobody may write to a directory in it.

    Caches of some package managers are read-only, and what is in them could not be removed.
    """
    for folder, names, _ in walk(top):
        for path in (Path(folder, name) for name in names):
            if not path.is_symlink():
                with suppress(OSError):
                    path.chmod(0o700)
    shutil.rmtree(top, ignore_errors=True)
