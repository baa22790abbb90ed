"""Digests of what an evaluation plays: its tasks, its files of code and the settings of its environments.

They are kept with the run. A run that is resumed with other digests would put the results of two environments
under one heading.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from agentenv.core.episode_env import Task, digest
from agentenv.core.errors import UsageError
from agentenv.core.faults import is_foreign
from agentenv.envs.registry import EnvSpec
from agentenv.runs.store.runinfo import RunInfo
from agentenv.runs.store.trust import executed_files

__all__ = ["made_of", "refuse_changed", "reward_weights"]


def made_of(
    specs: Sequence[EnvSpec], tasks: Sequence[Sequence[Task]], config: Mapping[str, Any]
) -> dict[str, str]:
    """Return a digest of each part that decides what is played, by the name of the part.

    Args:
        specs: the environments.
        tasks: the tasks that are played of each.
        config: the record of the configuration, which may name files.
    """
    parts: dict[str, str] = {}
    files = {Path(file) for file in executed_files(config)}
    for entry, chosen in zip(specs, tasks, strict=True):
        rows = [(task.id, digest(task.data, number)) for number, task in enumerate(chosen)]
        parts[f"the tasks of {entry.id}"] = _digest(rows)
        parts[f"the settings of {entry.id}"] = _digest(_settings(entry))
        files |= _files_of(entry)
    # By name and not by path, because a run may be resumed where its files were moved to.
    names = sorted({file.name for file in files})
    for name in names:
        same = sorted(file.read_bytes() for file in files if file.name == name and file.is_file())
        parts[f"the file {name}"] = blake2b(b"\0".join(same), digest_size=8).hexdigest()
    return parts


def reward_weights(specs: Iterable[EnvSpec]) -> dict[str, float]:
    """Return the weight of each named reward that is registered with the environments."""
    return {reward.label: reward.weight for entry in specs for reward in entry.rewards}


def refuse_changed(info: RunInfo, now: Mapping[str, str]) -> None:
    """Refuse to go on with a run whose parts have changed; a run without digests is not compared.

    Raises:
        UsageError: A part has changed.
    """
    changed = [name for name, value in info.made_of.items() if now.get(name) != value]
    if changed:
        raise UsageError(
            f"run {info.id} cannot go on: since it began, {' and '.join(changed)} changed, and new episodes "
            "would not be comparable with those it has",
            remedy="start a new evaluation, or say --resume-anyway to go on with this one",
        )


def _settings(entry: EnvSpec) -> dict[str, Any]:
    return {
        "entry_point": entry.entry_point,
        "kwargs": dict(entry.kwargs),
        "limits": None if entry.limits is None else asdict(entry.limits),
        "rewards": [(each.name, each.weight, each.timeout_s) for each in entry.rewards],
        "user": entry.user,
        "done_policy": entry.done_policy,
        "sandbox": entry.sandbox,
    }


def _files_of(entry: EnvSpec) -> set[Path]:
    """Return the files that define the environment, its rewards and its user, without those of libraries."""
    target = entry.load()
    bases = target.__mro__[1:] if isinstance(target, type) else ()
    others: list[object] = [*bases, *(reward.function for reward in entry.rewards), entry.user]
    files = {_file_of(target), *filter(_is_of_user, map(_file_of, others))}
    return {file for file in files if file is not None}


def _file_of(item: object) -> Path | None:
    name = getattr(item, "__module__", None)
    file = getattr(sys.modules.get(name), "__file__", None) if isinstance(name, str) else None
    return None if file is None else Path(file)


def _is_of_user(file: Path | None) -> bool:
    return file is not None and is_foreign(str(file)) and "site-packages" not in file.parts


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=_named)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _named(value: object) -> str:
    """Return the name of what is no JSON value; its own text may hold an address, which changes."""
    name = getattr(cast("Callable[..., object]", value), "__qualname__", None)
    return str(name or type(value).__qualname__)
