"""Import plain Python files. A file is imported once.

Its module has a name made from the path. If the program imported the file as a module before, that module is
used, so that what the file registers is registered once.
"""

from __future__ import annotations

import importlib.util
import sys
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

from agentenv.core.errors import UsageError, did_you_mean

__all__ = ["imported_file", "load_file"]


def load_file(path: str, error: type[UsageError] = UsageError) -> str:
    """Import a Python file and return the name of its module; a changed file is imported again.

    The file can import modules from its own directory.

    Args:
        path: path of the file.
        error: class of the error to raise.

    Raises:
        UsageError: There is no such file, or it is not a Python file.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        beside = [other.name for other in file.parent.glob("*.py")]
        raise error(
            f"there is no file {path!r} (looked for {file})",
            remedy=did_you_mean(file.name, beside)
            or "name a file, or an environment that `agentenv list` shows",
        )
    stamp = file.stat().st_mtime_ns
    name = _name_of(file)
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__dict__.get("__agentenv_stamp__") == stamp:
        return name
    if loaded is None and (module := sys.modules.get(file.stem)) is not None and _file_of(module) == file:
        return file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise error(f"{path!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    directory = str(file.parent)
    if directory not in sys.path:
        sys.path.append(directory)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    module.__dict__["__agentenv_stamp__"] = stamp
    return name


def imported_file(module: str) -> ModuleType | None:
    """Return the module that `load_file` made of the file of a module, if it did."""
    if module in sys.modules or "." in module:
        return None
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return None
    return sys.modules.get(_name_of(Path(spec.origin).resolve()))


def _name_of(file: Path) -> str:
    return f"agentenv_file_{file.stem}_{blake2b(str(file).encode(), digest_size=4).hexdigest()}"


def _file_of(module: ModuleType) -> Path | None:
    path = getattr(module, "__file__", None)
    return None if path is None else Path(path).resolve()
