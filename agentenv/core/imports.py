"""Import an object by a name such as `module:attr` or `file.py:attr`, and name an object so."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from hashlib import blake2b
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from agentenv.core.errors import UsageError, did_you_mean

__all__ = ["import_object", "load_file", "name_of"]


def import_object(name: str, error: type[UsageError] = UsageError, *, where: str = "") -> Any:
    """Return the object that `module:attr` or `file.py:attr` names; `attr` may contain dots.

    Args:
        name: name of the object, such as `shop.rewards:exact`.
        error: class of the error to raise.
        where: option or setting that contains the name, such as `--demos`; it begins the message.

    Raises:
        UsageError: The name does not have this form, or the module or the attribute cannot be found.
    """
    label = f"{where}: {name!r}" if where else repr(name)
    module, colon, attribute = name.rpartition(":")
    if not (module and colon and attribute):
        raise error(
            f"{label} is not of the form 'module:attr' or 'file.py:attr'",
            remedy="write a module or a file, and a name in it",
        )
    try:
        loaded = load_file(module, error) if module.endswith(".py") else module
        value: Any = import_module(loaded)
    except ImportError as cause:
        raise error(f"{label} cannot be loaded: {cause}") from cause
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as cause:
            remedy = did_you_mean(part, dir(value)) or "name something that it defines"
            raise error(f"{label} cannot be loaded: {module} has no {part!r}", remedy=remedy) from cause
    return value


def name_of(value: object) -> str:
    """Return the name with which `import_object` finds a class or function; empty if there is none."""
    module, attribute = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(attribute, str) or "<" in attribute:
        return ""
    loaded = sys.modules.get(module)
    if module == "__main__" or hasattr(loaded, "__agentenv_stamp__"):
        # Another process has no such module, but it can load the file.
        file = getattr(loaded, "__file__", None)
        return f"{file}:{attribute}" if file else ""
    return f"{module}:{attribute}"


# A file is imported once, so that what it registers is registered once. Its module has a name made from the
# path, and also its plain name where an import in another file means this file. If the program imported the
# file as a module before, that module is used.
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
    names = [name]
    if sys.modules.get(file.stem) is loaded and _meant_by(file.stem) == file:
        names.append(file.stem)
    sys.modules.update(dict.fromkeys(names, module))
    try:
        spec.loader.exec_module(module)
    except BaseException as stopped:
        for each in names:
            sys.modules.pop(each, None)
        line = _line_in(file, stopped)
        if isinstance(stopped, SystemExit):  # whose code may be 0, for a run in which nothing was played
            refused = error(
                f"{path!r} ended the program while it was loaded: SystemExit({stopped.code!r})",
                remedy="put what is to run as a program under if __name__ == '__main__':",
            )
            refused.add_note(f"{file.name}:{line}")
            raise refused from stopped
        if isinstance(stopped, UsageError) and line is not None:
            stopped.add_note(f"{file.name}:{line}")
        raise
    module.__dict__["__agentenv_stamp__"] = stamp
    return name


def _line_in(file: Path, error: BaseException) -> int | None:
    """Return the last line of a file at which an error passed; None if it is another file's."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(file)), None)


def _meant_by(module: str) -> Path | None:
    """Return the file that an import of this name would load; None if there is none."""
    spec = PathFinder.find_spec(module)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


def _name_of(file: Path) -> str:
    return f"agentenv_file_{file.stem}_{blake2b(str(file).encode(), digest_size=4).hexdigest()}"


def _file_of(module: ModuleType) -> Path | None:
    path = getattr(module, "__file__", None)
    return None if path is None else Path(path).resolve()
