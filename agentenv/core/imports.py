"""Import what a text such as `module:attr` names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from agentenv.core.errors import UsageError

__all__ = ["import_object"]


def import_object(name: str, error: type[UsageError] = UsageError, *, where: str = "") -> Any:
    """Return the object that `module:attr` names; `attr` may have dots.

    Args:
        name: such as `shop.rewards:exact`.
        error: what to raise.
        where: what names it, for the message; such as `--demos`.

    Raises:
        UsageError: The name has another form, or the module or the attribute cannot be found.
    """
    label = f"{where}: {name!r}" if where else repr(name)
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise error(f"{label} is not of the form 'module:attr'", remedy="name a module and what is in it")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as cause:
        raise error(f"{label} cannot be loaded: {cause}") from cause
    return found
