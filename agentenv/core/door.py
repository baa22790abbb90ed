"""One door a folder: a package's public names, each loaded when it is first used.

A package's `__init__` says which of its modules each public name comes from, and calls `door`. Nothing
is imported until a name is asked for, so that importing a package costs next to nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType

__all__ = ["door"]


class _Package(ModuleType):
    """A package whose public names are loaded by attribute access (as PEP 562 does for one module)."""

    def __getattr__(self, name: str) -> object:
        if name in self.__dict__["_packages"]:
            return import_module(f"{self.__name__}.{name}")  # which also sets the attribute
        home = self.__dict__["_homes"].get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return self.__dict__["_load"](name, home)

    def __setattr__(self, name: str, value: object) -> None:
        # Importing a submodule sets it on its package. Where a public name is also a module's, such as
        # the decorator `tool` of `tools/tool.py`, the public name stays what it is.
        if not (isinstance(value, ModuleType) and name in self.__dict__["_homes"]):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return list(self.__dict__["__all__"])


class _CallablePackage(_Package):
    """A package that can be called in place of one of its functions, as `agentenv.train(...)` is."""

    @property
    def __call__(self) -> Callable[..., object]:
        # A property, so that Python calls the function itself, without a frame in between.
        function: Callable[..., object] = getattr(self, self.__dict__["_call"])
        return function


def door(
    package: str,
    names: Mapping[str, Sequence[str]],
    *,
    packages: Sequence[str] = (),
    call: str = "",
    require: Callable[[str], None] | None = None,
) -> list[str]:
    """Let a package load its public names when they are first used.

    Args:
        package: the package's `__name__`.
        names: public names by the submodule they come from, such as `{"base": ["Engine", "Sampling"]}`.
        packages: packages in it that are public names themselves.
        call: the public function that is meant where the package itself is called; none if empty.
        require: called with a name before it is loaded; raises if something that it needs is missing.

    Returns:
        All names, sorted, for the package's `__all__`.
    """
    module = sys.modules[package]
    homes = {name: home for home, public in names.items() for name in public}

    def load(name: str, home: str) -> object:
        if require is not None:
            require(name)
        value = getattr(import_module(f"{package}.{home}"), name)
        module.__dict__[name] = value
        return value

    module.__dict__.update(_homes=homes, _packages=frozenset(packages), _call=call, _load=load)
    module.__class__ = _CallablePackage if call else _Package
    return sorted([*homes, *packages])
