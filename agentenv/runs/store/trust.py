"""Tell runs that this user made from runs that came from elsewhere.

A run names code: environment files, modules, a model, options of the engine. Who resumes or replays the run
executes that code, so a run directory from somebody else is as dangerous as a program from them. Therefore
each user has a random key in a file that only the user can read, and a new run is signed with it.

1. The signature covers all settings of the run, what it is, when it was made, and the directory in which it
   was made, because file names may be relative to it. Nobody without the key can make or change such a run.
2. The key never enters a run directory.
3. Where a run is resumed from another directory, a relative name may mean another file; such a run counts as
   one from elsewhere.
4. Runs of the kind `import` are never signed: their settings come from another run.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agentenv.core.errors import UsageError
from agentenv.core.visible import logger
from agentenv.runs.store.codec import dumps
from agentenv.runs.store.runinfo import RunInfo

__all__ = ["executed_files", "is_own", "names_parts", "require_trust", "signed"]

_log = logger(__name__)
_SIGNED = ("id", "kind", "env_ids", "model", "seed", "config", "created", "directory")
"""Fields that the signature covers; the others change while a run goes on, and nothing executes them."""
_KEY_BYTES = 32


def signed(info: RunInfo) -> RunInfo:
    """Return the info with the user's signature; without one if this user can keep no key."""
    if info.kind == "import":
        return info
    info = replace(info, directory=str(Path.cwd()))
    key = _key(make=True)
    return info if key is None else replace(info, signature=_signature(info, key))


def is_own(info: RunInfo) -> bool:
    """Return whether this user made the run and its names still mean the same files."""
    key = _key(make=False)
    if key is None or info.kind == "import":
        return False
    # A run from elsewhere may have anything in this field.
    given = str(info.signature).encode(errors="replace")
    try:
        right = _signature(info, key)
    except RecursionError:  # nested deeper than anything that `signed` can have written
        return False
    if not hmac.compare_digest(right.encode(), given):
        return False
    return all(_resolved(name, info.directory) == _resolved(name, ".") for name in _names(info.config))


def executed_files(config: Mapping[str, Any]) -> list[str]:
    """Return the absolute paths of the Python files that a run's settings name, to be printed."""
    return list(dict.fromkeys(_printable(str(_resolved(name, "."))) for name in _names(config)))


def require_trust(info: RunInfo, *, trust: bool, purpose: str) -> None:
    """Check that the code that a run names may be executed.

    Args:
        info: info of the run.
        trust: whether the user says that the run can be trusted.
        purpose: what is done with the run, such as "resuming"; it begins the message.

    Raises:
        UsageError: This user did not make the run, and does not say that it can be trusted.
    """
    if trust or is_own(info):
        return
    named = executed_files(info.config) or [_short(info.config.get("envs", info.env_ids))]
    raise UsageError(
        f"{purpose} run {info.id!r:.80} executes what the run names ({', '.join(named)}), and you did not "
        "make it on this machine and in this directory",
        remedy="read its run.json and these files; if you trust them, repeat this with --trust (trust=True)",
    )


def _short(value: object) -> str:
    names = [str(name) for name in value] if isinstance(value, list | tuple | dict) else [str(value)]
    return ", ".join(_printable(f"{name:.80}") for name in names[:5])


def _printable(text: str) -> str:
    """Return a text of a run without what would move a terminal's cursor or hide the rest."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def names_parts(config: Mapping[str, Any]) -> bool:
    """Return whether the runner's settings name code, which is executed in whatever environment plays."""
    return any(":" in name for name in _parts(config))


def _parts(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the runner's parts, and its other settings as texts."""
    runner = config.get("runner")
    parts = runner.values() if isinstance(runner, dict) else ()
    return [str(part.get("name", "") if isinstance(part, dict) else part) for part in parts]


def _names(config: Mapping[str, Any]) -> list[str]:
    """Return the Python files among the names of environments, policies, a rollout and the runner's parts."""
    envs = config.get("envs", ())
    names = [str(name) for name in envs] if isinstance(envs, list | tuple | dict) else []
    names += _parts(config)
    names += [str(config.get(policy, "")).removeprefix("policy:") for policy in ("model", "demos")]
    train = config.get("train")
    names.append(str(train.get("rollout", "")) if isinstance(train, dict) else "")
    return [file for file in (name.partition(":")[0] for name in names) if file.endswith(".py")]


def _resolved(name: str, directory: str) -> Path:
    try:
        return (Path(directory) / Path(name).expanduser()).resolve()
    except (OSError, ValueError, RuntimeError):  # no such user, a null character, a circle of links
        return Path(directory) / name


def _signature(info: RunInfo, key: bytes) -> str:
    # Through JSON, so that a value counts as what `run.json` keeps of it, such as a list for a tuple.
    values = json.loads(dumps({name: value for name, value in asdict(info).items() if name in _SIGNED}))
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local" / "state") / "agentenv" / "run-key"


def _key(*, make: bool) -> bytes | None:
    """Return the user's key; None if there is none, or if others can read or write it."""
    try:
        file = _key_file()
        if make and not file.exists():
            _make_key(file)
        state = file.stat()
        # Elsewhere the rights of a file are not in its mode, and a home directory is its owner's.
        if os.name == "posix" and (state.st_uid != os.geteuid() or state.st_mode & 0o077):
            _log.warning("%s is not used, because it is not private to you; delete it or chmod 600 it", file)
            return None
        key = bytes.fromhex(file.read_text(encoding="ascii").strip())
    except (OSError, ValueError, RuntimeError) as error:
        if make:
            _log.warning("this run cannot be signed, so --resume will ask for --trust: %s", error)
        return None
    return key if len(key) >= _KEY_BYTES else None


def _make_key(file: Path) -> None:
    """Write a new key; of processes that do so together, the first one wins."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as target:
            target.write(secrets.token_hex(_KEY_BYTES))
        with suppress(FileExistsError):
            os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)
