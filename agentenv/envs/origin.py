"""How another process finds an environment: through the module or file that registers it, or by its record.

1. A registered environment is found by importing what registered it, and one that is made of nothing but a
   class by importing the class, so tasks and rewards may be anything. Any other specification travels as its
   JSON record, whose parts must have importable names.
2. A file is named by its path as seen from the working directory, because the name of its module differs
   between machines. A script that runs as `__main__` is a file, too.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentenv.core.errors import UnknownEnvironment, UsageError
from agentenv.core.imports import import_object, load_file, name_of
from agentenv.envs.registry import registry
from agentenv.envs.spec import EnvSpec

__all__ = ["find_again", "origin_of"]

_FILE_MODULE = re.compile(r'"(agentenv_file_\w+|__main__):')
"""Names in a record of what is defined in a file."""


def origin_of(entry: EnvSpec) -> str:
    """Return JSON text from which `find_again` finds the specification in another process.

    Raises:
        UsageError: The environment is not registered, and a part of it cannot be imported by name.
    """
    registered = registry.loaded.get(entry.id)
    if registered is not None and replace(entry, kwargs=registered.kwargs) == registered:
        kwargs = None if entry.kwargs == registered.kwargs else dict(entry.kwargs)
        return _text(entry, {"source": _source(registry.registrar(entry.id)), "kwargs": kwargs})
    target, name = entry.target, name_of(entry.target)
    if target is not None and name and EnvSpec.of(entry.id, target, kwargs=entry.kwargs) == entry:
        source = f"{_source(target.__module__)}:{target.__qualname__}"
        return _text(entry, {"target": source, "kwargs": dict(entry.kwargs)})
    record = entry.to_json()
    modules = set(_FILE_MODULE.findall(record))
    return json.dumps({"record": record, "files": {name: _source(name) for name in sorted(modules)}})


def find_again(origin: str) -> EnvSpec:
    """Return the specification that `origin_of` described, which imports its module or file.

    Raises:
        UnknownEnvironment: The module or the file does not exist here, or does not register it.
    """
    data: Mapping[str, Any] = json.loads(origin)
    if "target" in data:
        target = import_object(data["target"], UnknownEnvironment)
        return EnvSpec.of(data["id"], target, kwargs=data["kwargs"])
    if "record" not in data:
        return _registered(data["id"], data["source"], data["kwargs"])
    record: str = data["record"]
    for module, file in data["files"].items():
        record = record.replace(f'"{module}:', f'"{load_file(file, UnknownEnvironment)}:')
    return EnvSpec.from_json(record)


def _text(entry: EnvSpec, origin: Mapping[str, object]) -> str:
    try:
        return json.dumps({"id": entry.id, **origin})
    except (TypeError, ValueError) as error:
        raise UsageError(f"kwargs of {entry.id} cannot be written as JSON: {error}") from error


def _registered(id: str, source: str, kwargs: Mapping[str, Any] | None) -> EnvSpec:
    if source.endswith(".py"):
        load_file(source, UnknownEnvironment)
    elif source:
        try:
            importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise UnknownEnvironment(
                f"environment {id!r} is registered by the module {source!r}, which this process cannot "
                f"import: {error}"
            ) from error
    entry = registry[id]
    return entry if kwargs is None else replace(entry, kwargs=kwargs)


def _source(module: str) -> str:
    """Return the file or the module to import for what a module registers or defines; empty for neither."""
    loaded = sys.modules.get(module)
    if module != "__main__" and not hasattr(loaded, "__agentenv_stamp__"):
        return module
    file = getattr(loaded, "__file__", None)
    if file is None:
        raise UsageError(
            "the environment is defined in an interactive session, where no other process finds it",
            remedy="define it in a file",
        )
    path = Path(file).resolve()
    with suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
