"""Load the public names of a package when they are first used.

A package's `__init__` imports its public names for type checkers only, and calls `door`, which reads these
lines. A module is imported when one of its names is used, so importing the package takes almost no time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["door"]

_IMPORT = re.compile(r"^    from ([\w.]+) import (\w+) as \2$", re.MULTILINE)
"""A public name as `if TYPE_CHECKING:` imports it; the alias marks it as public for type checkers."""


class _Package(ModuleType):
    """A package that loads a public name when the attribute is read (PEP 562 does this for a module)."""

    def __getattr__(self, name: str) -> object:
        home = self.__dict__["_homes"].get(name)
        if home is None:
            from agentenv.core.errors import did_you_mean

            meant = "" if name.startswith("_") else did_you_mean(name, self.__dict__["_homes"])
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}; {meant}".rstrip("; "))
        if home == self.__name__:
            return import_module(f"{home}.{name}")  # which also sets the attribute
        return self.__dict__["_load"](name, home)

    def __setattr__(self, name: str, value: object) -> None:
        # Python sets an imported submodule as an attribute of its package. If a public name equals a
        # module's name, as the decorator `tool` in `tools/tool.py` does, the attribute must stay the
        # public name, so the module is not set.
        home = self.__dict__["_homes"].get(name, self.__name__)
        if not (isinstance(value, ModuleType) and home != self.__name__):
            super().__setattr__(name, value)

    def __call__(self, *_: object, **__: object) -> object:
        name = self.__name__.rpartition(".")[2].removesuffix("s")
        meant = f"; did you mean {name}?" if name in self.__dict__["_homes"] else ""
        raise TypeError(f"{self.__name__} is a package and cannot be called{meant}")

    def __dir__(self) -> list[str]:
        return list(self.__dict__["__all__"])


def door(package: str, *, require: Callable[[str], None] | None = None) -> list[str]:
    """Let a package load its public names when they are first used.

    Args:
        package: `__name__` of the package. Its public names are those that it imports under `TYPE_CHECKING`
            in the form `from module import name as name`.
        require: function that is called with a name before the name is loaded, and raises if an optional
            package is missing.

    Returns:
        All public names in alphabetical order, for the package's `__all__`.
    """
    module: Any = sys.modules[package]
    source: bytes = module.__spec__.loader.get_data(module.__file__)
    homes = {name: home for home, name in _IMPORT.findall(source.decode())}

    def load(name: str, home: str) -> object:
        if require is not None:
            require(name)
        value = getattr(import_module(home), name)
        module.__dict__[name] = value
        return value

    module.__dict__.update(_homes=homes, _load=load)
    module.__class__ = _Package
    return sorted(homes)
