"""Load the public names of a package when they are first used.

A package's `__init__` calls `door` with its public names and the modules that define them. A module is
imported only when one of its names is used, so that importing the package takes almost no time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType

__all__ = ["door"]


class _Package(ModuleType):
    """A package that loads a public name when the attribute is read (PEP 562 does this for a module)."""

    def __getattr__(self, name: str) -> object:
        if name in self.__dict__["_packages"]:
            return import_module(f"{self.__name__}.{name}")  # which also sets the attribute
        home = self.__dict__["_homes"].get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return self.__dict__["_load"](name, home)

    def __setattr__(self, name: str, value: object) -> None:
        # Python sets an imported submodule as an attribute of its package. If a public name equals a
        # module's name, as the decorator `tool` in `tools/tool.py` does, the attribute must stay the
        # public name, so the module is not set.
        if not (isinstance(value, ModuleType) and name in self.__dict__["_homes"]):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return list(self.__dict__["__all__"])


def door(
    package: str,
    names: Mapping[str, Sequence[str]],
    *,
    packages: Sequence[str] = (),
    require: Callable[[str], None] | None = None,
) -> list[str]:
    """Let a package load its public names when they are first used.

    Args:
        package: `__name__` of the package.
        names: public names by the submodule that defines them, such as `{"base": ["Engine", "Sampling"]}`.
        packages: folders of the package that are public names themselves.
        require: function that is called with a name before the name is loaded, and raises if an optional
            package is missing.

    Returns:
        All public names in alphabetical order, for the package's `__all__`.
    """
    module = sys.modules[package]
    homes = {name: home for home, public in names.items() for name in public}

    def load(name: str, home: str) -> object:
        if require is not None:
            require(name)
        value = getattr(import_module(f"{package}.{home}"), name)
        module.__dict__[name] = value
        return value

    module.__dict__.update(_homes=homes, _packages=frozenset(packages), _load=load)
    module.__class__ = _Package
    return sorted([*homes, *packages])
