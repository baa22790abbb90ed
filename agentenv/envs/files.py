"""Environments in plain files: a file is imported once, under a name that follows from its path."""

from __future__ import annotations

import importlib.util
import sys
from hashlib import blake2b
from pathlib import Path

from agentenv.core.errors import UnknownEnvironment

__all__ = ["load_file"]


def load_file(path: str) -> str:
    """Import a Python file and return the name of its module; a file that changed is read again.

    Modules beside the file can be imported by it.

    Raises:
        UnknownEnvironment: There is no such file.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UnknownEnvironment(f"no file {path!r} (looked for {file})")
    stamp = file.stat().st_mtime_ns
    name = f"agentenv_file_{file.stem}_{blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__dict__.get("__agentenv_stamp__") == stamp:
        return name
    made = importlib.util.spec_from_file_location(name, file)
    if made is None or made.loader is None:
        raise UnknownEnvironment(f"{path!r} is not a Python file")
    module = importlib.util.module_from_spec(made)
    beside = str(file.parent)
    if beside not in sys.path:
        sys.path.append(beside)
    sys.modules[name] = module
    try:
        made.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    module.__dict__["__agentenv_stamp__"] = stamp
    return name
