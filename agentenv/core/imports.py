"""Import an object by a name such as `module:attr` or `file.py:attr`, and name an object so."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from agentenv.core.errors import UsageError, did_you_mean

__all__ = ["import_object", "name_of"]


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
    # Most names are found without a file.
    from agentenv.core.files import imported_file, load_file

    try:
        loaded = load_file(module, error) if module.endswith(".py") else module
        value: Any = imported_file(loaded) or import_module(loaded)
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
