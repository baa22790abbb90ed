"""`run.json`: what was run, with which versions, and how it ended."""

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

from agentenv.core.errors import StoreError
from agentenv.core.messages import JsonValue
from agentenv.runs.store.codec import dumps

__all__ = ["SCHEMA_VERSION", "RunInfo", "RunStatus", "installed_versions", "write_text_atomically"]

SCHEMA_VERSION = 1
"""Layout of a run directory. Raised when an older reader would misread it; older layouts still open."""
_BROKEN = "restore it from a copy, or delete the directory"


class RunStatus(StrEnum):
    """How far a run came."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """Stopped by the user, or its process was killed; can be resumed."""
    FAILED = "failed"
    """Stopped by an error that is in `note`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Contents of `run.json`."""

    id: str
    kind: str
    """`eval`, `train` or `import`."""
    env_ids: tuple[str, ...] = ()
    model: str = ""
    seed: int = 0
    config: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Everything that was resolved: limits, sampling, tasks, trainer settings."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    created: str = ""
    """ISO 8601, UTC."""
    closed: str = ""
    status: RunStatus = RunStatus.RUNNING
    note: str = ""
    expected_episodes: int | None = None
    """Episodes that the run is to have when it is finished."""
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def start(cls, run_id: str, kind: str, **values: Any) -> RunInfo:
        """Return the info of a run that begins now."""
        return cls(id=run_id, kind=kind, versions=installed_versions(), created=_now(), **values)

    def ended(self, status: RunStatus, note: str = "") -> RunInfo:
        """Return the info with its end."""
        return replace(self, status=status, note=note, closed=_now())

    def write(self, directory: Path) -> None:
        """Write `run.json` so that a reader sees the old or the new one, never a part.

        Raises:
            StoreError: The file cannot be written.
        """
        write_text_atomically(directory / "run.json", json.dumps(json.loads(dumps(asdict(self))), indent=1))

    @classmethod
    def read(cls, directory: Path) -> RunInfo:
        """Read `run.json`.

        Raises:
            StoreError: It is missing, broken, or written by a newer agentenv.
        """
        path = directory / "run.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise StoreError(f"{directory} is not a run directory: it has no run.json") from None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} cannot be read: {error}", remedy=_BROKEN) from error
        if not isinstance(data, dict) or "id" not in data:
            raise StoreError(f"{path} is not the description of a run", remedy=_BROKEN)
        version = data.get("schema_version", 1)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise StoreError(
                f"{path} has layout {version}, newer than {SCHEMA_VERSION}", remedy="install a newer agentenv"
            )
        known = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        known.setdefault("kind", "eval")
        try:
            known["env_ids"] = tuple(known.get("env_ids", ()))
            known["status"] = RunStatus(known.get("status", "interrupted"))
            return cls(**known)
        except (TypeError, ValueError) as error:
            raise StoreError(f"{path} is not the description of a run: {error}", remedy=_BROKEN) from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in ("agentenv-rl", "torch", "transformers", "tokenizers", "vllm", "gymnasium", "pydantic"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a file in one step.

    Raises:
        StoreError: The directory cannot be written or the disk is full.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
