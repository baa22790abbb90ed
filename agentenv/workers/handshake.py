"""What a worker plays with, compared with what the driver has: another version would spoil a run in silence.

The episodes of one run are played on many machines. A machine that still has yesterday's data file or another
version of this library plays along, and nothing in its records shows it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from time import time

from agentenv.core.errors import UsageError
from agentenv.envs.spec import EnvSpec

__all__ = ["Handshake", "parts_here"]

CODE = ".py"
KINDS = frozenset(
    {CODE, ".json", ".jsonl", ".csv", ".tsv", ".txt", ".md", ".toml", ".yaml", ".yml", ".parquet"}
)
"""Endings of the files beside an environment that are compared."""
MOST_FILES = 500
"""Most files of one directory that are compared; of a larger one only its code is."""
MOST_FOLDERS = 100
"""Most folders below one directory whose files are compared."""
NEVER = frozenset({"__pycache__", "runs", "node_modules", "site-packages"})
"""Folders whose files no environment is made of."""
WHOLE_BYTES = 64_000_000
"""Size of the largest file that is read whole; of a larger one the beginning, the end and the size count."""


class Handshake:
    """Refuses workers that play with something else than the driver.

    Args:
        specs: the environments of the run.
    """

    def __init__(self, specs: Sequence[EnvSpec]) -> None:
        self._specs, self._began = specs, time()
        self._here = parts_here(specs)

    def require(self, there: Mapping[str, str], worker: str, node: str) -> None:
        """Compare the parts of a worker with those of this process.

        Raises:
            UsageError: They differ.
        """
        other = {name for name, digest in self._here.items() if there.get(name) != digest}
        if other:
            # Data that has changed here since the run began is what the run writes, and not what it reads.
            other &= parts_here(self._specs, unchanged_since=self._began).keys()
        if other:
            said = [f"{'another' if name in there else 'no'} {name}" for name in sorted(other)]
            raise UsageError(
                f"worker {worker} on {node} cannot play this run: unlike the driver it has {', '.join(said)}",
                remedy="bring the same files and the same agentenv to all machines; a Ray cluster ships the "
                "working directory with `ray job submit --working-dir .`",
            )


def parts_here(specs: Sequence[EnvSpec], *, unchanged_since: float | None = None) -> dict[str, str]:
    """Return a digest of each part that decides what this process plays, by the name of the part.

    Args:
        specs: the environments.
        unchanged_since: leaves out data files that were written later, in seconds since 1970.
    """
    parts = {"Python": f"{sys.version_info[0]}.{sys.version_info[1]}", "agentenv": _library()}
    for directory in sorted({file.parent for spec in specs for file in _files_of(spec)}):
        for file in (file for folder in (directory, *_named(directory)) for file in _beside(folder)):
            stat = file.stat()
            if unchanged_since is None or file.suffix == CODE or stat.st_mtime < unchanged_since:
                parts[file.relative_to(directory.parent).as_posix()] = _digest(file, stat.st_size)
    return parts


def _files_of(spec: EnvSpec) -> Iterable[Path]:
    """Return the files that define an environment, its rewards and its user."""
    for item in (spec.load(), spec.user, *(reward.function for reward in spec.rewards)):
        file = getattr(sys.modules.get(str(getattr(item, "__module__", ""))), "__file__", None)
        if file and _LIBRARY not in Path(file).parents:
            yield Path(file)


_LIBRARY = Path(__file__).parents[1]


def _beside(directory: Path) -> list[Path]:
    files = sorted(file for file in directory.iterdir() if file.suffix in KINDS and file.is_file())
    return files if len(files) <= MOST_FILES else [file for file in files if file.suffix == CODE]


def _named(directory: Path) -> list[Path]:
    """Return the folders in a directory that its code names, to import or to read them, and those in them."""
    code = [file.read_text(encoding="utf-8", errors="replace") for file in directory.glob(f"*{CODE}")]
    names = {name for text in code for name in re.findall(r"[\w-]+", text)} - NEVER
    found: list[Path] = []
    for named in sorted(folder for folder in directory.iterdir() if folder.name in names):
        for place, folders, _ in os.walk(named):
            folders[:] = sorted(set(folders) - NEVER)
            found.append(Path(place))
            if len(found) == MOST_FOLDERS:
                return found
    return found


@cache
def _library() -> str:
    """Return the digest of this library's code, as it was when it was first asked for."""
    files = sorted(_LIBRARY.rglob(f"*{CODE}"))
    return _short(b"".join(blake2b(file.read_bytes()).digest() for file in files))


def _digest(file: Path, size: int) -> str:
    if size <= WHOLE_BYTES:
        return _short(file.read_bytes())
    with file.open("rb") as content:
        begin = content.read(WHOLE_BYTES // 2)
        content.seek(-WHOLE_BYTES // 2, 2)
        return _short(begin + content.read() + str(size).encode())


def _short(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()
