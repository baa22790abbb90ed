"""Import an object by a name such as `module:attr` or `path/to/file.py:attr`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from agentenv.core.errors import UnknownEnvironment, UsageError
from agentenv.core.files import imported_file, load_file

__all__ = ["import_object"]


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
        if module.endswith(".py"):
            module = load_file(module)
        value: Any = imported_file(module) or import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, UnknownEnvironment) as cause:
        raise error(f"{label} cannot be loaded: {cause}") from cause
    return value
