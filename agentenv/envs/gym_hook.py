"""Make our environments available through `gymnasium.make`, at no cost until Gymnasium is imported.

Gymnasium has no plug-in mechanism. `install` puts a finder on `sys.meta_path`. When
`gymnasium.envs.registration` is imported, the finder adds our ids to Gymnasium's registry and removes
itself. If Gymnasium is already imported, the ids are added at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["install", "make_for_gymnasium", "mirror"]

_REGISTRATION = "gymnasium.envs.registration"


def install() -> None:
    """Add our ids to Gymnasium's registry, now or when Gymnasium is imported."""
    if _REGISTRATION in sys.modules:
        mirror()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        finder: Any = _Finder()
        sys.meta_path.insert(0, finder)


def mirror() -> None:
    """Register our environments with Gymnasium, and each environment that is added later."""
    ours = importlib.import_module("agentenv.envs.registry").registry
    for id in ours:
        _register(id)
    ours.watch(_register)


def make_for_gymnasium(env_id: str, **kwargs: Any) -> Any:
    """Make an environment; this is the entry point of our ids in Gymnasium's registry."""
    return importlib.import_module("agentenv.envs.registry").make(env_id, **kwargs)


def _register(id: str) -> None:
    registration = sys.modules[_REGISTRATION]
    if id not in registration.registry:
        # The argument is called env_id because `make_vec` already passes an argument `id`.
        registration.register(
            id=id,
            entry_point=f"{__name__}:{make_for_gymnasium.__name__}",
            kwargs={"env_id": id},
        )


class _Finder:
    """Waits for the import of Gymnasium's registry, which the usual finders then find.

    It has the methods of `importlib.abc.MetaPathFinder`; importing that class would cost 20 ms.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRATION:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = _Loader(spec.loader)
            spec.loader = loader
        return spec


class _Loader:
    """Runs the module with its own loader, then adds our ids."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        # The module keeps its own loader, because that one can show the source and ours cannot.
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        mirror()
