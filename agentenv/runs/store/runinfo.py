"""`run.json`: the configuration, the package versions and the status of a run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from agentenv.core.errors import RunNotFound, StoreError
from agentenv.core.files import read_regular, write_regular
from agentenv.core.messages import JsonValue
from agentenv.runs.store.codec import dumps, loads

__all__ = ["SCHEMA_VERSION", "RunInfo", "RunStatus", "installed_versions", "write_text_atomically"]

SCHEMA_VERSION = 2
"""Version of the layout of a run directory.

It is increased when an older reader would misread a new layout; older layouts can still be read. In version 1
the token ids and log-probabilities of all episodes were lists of numbers.
"""
_BROKEN = "restore it from a copy, or delete the directory"
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "id": str,
    "kind": str,
    "model": str,
    "seed": int,
    "config": dict,
    "versions": dict,
    "made_of": dict,
    "reward_weights": dict,
    "created": str,
    "closed": str,
    "note": str,
    "expected_episodes": (int, type(None)),
}
"""Types of the fields of `run.json`. Lists of runs compare and print these fields, so one run with another
type would break the lists of all runs."""


class RunStatus(StrEnum):
    """Whether a run is still running, and if not, how it ended."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """The user stopped the run, or its process was killed; the run can be resumed."""
    FAILED = "failed"
    """An error stopped the run; `note` has its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Contents of `run.json`."""

    id: str
    kind: str
    """`eval`, `train`, `branch` or `import`."""
    env_ids: tuple[str, ...] = ()
    model: str = ""
    seed: int = 0
    config: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """The complete configuration: limits, sampling, tasks, trainer settings."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    created: str = ""
    """Start of the run in UTC, in ISO 8601 format; `closed` is its end."""
    closed: str = ""
    status: RunStatus = RunStatus.RUNNING
    note: str = ""
    expected_episodes: int | None = None
    """Number of episodes that the finished run will have; None if it is not known."""
    schema_version: int = SCHEMA_VERSION
    directory: str = ""
    """Directory in which the run was started, to which the names of its files are relative."""
    made_of: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests of the tasks, files and settings that are played, by name (see `runs/made_of.py`)."""
    terms: tuple[str, ...] = ()
    """What the means of an evaluation are means of, in words (see `runs/terms.py`)."""
    reward_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Weights of the named rewards in an episode's reward."""
    signature: str = ""
    """Proof that the user of this machine made the run (see `store/trust.py`); empty if it has none."""

    @classmethod
    def start(cls, run_id: str, kind: str, **values: Any) -> RunInfo:
        """Return the info of a run that starts now."""
        return cls(id=run_id, kind=kind, versions=installed_versions(), created=_now(), **values)

    def ended(self, status: RunStatus, note: str = "") -> RunInfo:
        """Return the info of the same run with its final status and the current time as its end."""
        return replace(self, status=status, note=note, closed=_now())

    def write(self, directory: Path) -> None:
        """Write `run.json` so that a reader sees either the old or the new file, never a part of it.

        Raises:
            StoreError: The file cannot be written.
        """
        write_text_atomically(directory / "run.json", json.dumps(json.loads(dumps(asdict(self))), indent=1))

    @classmethod
    def read(cls, directory: Path) -> RunInfo:
        """Read `run.json`.

        Raises:
            RunNotFound: The directory has no such file.
            StoreError: The file is broken, or was written by a newer agentenv.
        """
        path = directory / "run.json"
        try:
            data = loads(read_regular(path))
        except (FileNotFoundError, NotADirectoryError):
            missing = f"{directory} is not a run directory: it has no run.json"
            raise RunNotFound(
                missing, remedy="`agentenv runs` lists the runs; copy all files of one"
            ) from None
        except StoreError:
            raise
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} cannot be read: {error}", remedy=_BROKEN) from error
        if not isinstance(data, dict) or "id" not in data:
            raise StoreError(f"{path} does not describe a run", remedy=_BROKEN)
        version = data.get("schema_version", 1)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise StoreError(
                f"{path} has layout version {version}; this agentenv reads up to version {SCHEMA_VERSION}",
                remedy="install a newer agentenv",
            )
        known = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        known.setdefault("kind", "eval")
        wrong = [name for name, kind in _TYPES.items() if name in known and not isinstance(known[name], kind)]
        if wrong:
            raise StoreError(
                f"{path} does not describe a run: {wrong[0]} is {known[wrong[0]]!r:.100}", remedy=_BROKEN
            )
        try:
            for name in ("env_ids", "terms"):
                known[name] = tuple(map(str, known.get(name, ())))
            known["status"] = RunStatus(known.get("status", "interrupted"))
            return cls(**known)
        except (TypeError, ValueError) as error:
            raise StoreError(f"{path} does not describe a run: {error}", remedy=_BROKEN) from error


def _now() -> str:
    # To the microsecond, because `last` is the newest of runs that may have begun in the same second.
    return datetime.now(UTC).isoformat(timespec="microseconds")


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    versions = {"python": platform.python_version()}
    for name in ("agentenv-rl", "torch", "transformers", "tokenizers", "vllm", "gymnasium", "pydantic"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a file in one step, so that readers never see a partly written file.

    Raises:
        StoreError: The directory cannot be written or the disk is full.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_regular(draft, text.encode())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
