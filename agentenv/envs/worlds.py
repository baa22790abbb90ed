"""Worlds: environments of benchmarks and of other libraries by name, for example `gymnasium:FrozenLake-v1`.

A world turns the part of a name after the colon into a specification. Packages add worlds in the entry-point
group `agentenv.worlds`, each under the prefix before the colon, and its object is a `World`. The module that
defines it must import quickly: it is imported for lists, so whatever is heavy is imported by `spec`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from agentenv.core.errors import DependencyMissing, UnknownEnvironment
from agentenv.core.registry import Registry, of_kind
from agentenv.envs.spec import EnvSpec

__all__ = ["World", "WorldFacts", "world_registry"]


@dataclass(frozen=True, slots=True)
class WorldFacts:
    """What a person wants to know of a world before playing it, for `agentenv list --worlds`."""

    licence: str
    """Licence of the world's own package."""
    tasks: str
    """Number of tasks of each split."""
    oracle: str
    """Which of its environments have a policy that solves them."""
    episode: str
    """Time that an episode took here, without the model's."""
    broken: str = ""
    """Ids that cannot be played or solved, or whose scorer pays for nothing."""


@dataclass(frozen=True, slots=True)
class World:
    """How the environments of a benchmark or of another library are named, and what they need."""

    spec: Callable[[str], EnvSpec]
    """Makes the specification of the name after the colon.

    It raises `UnknownEnvironment` if the package has no environment of this name, `DependencyMissing` if the
    package is not installed, and `UsageError` if the environment cannot be played, so that nobody learns this
    from failed episodes."""
    form: str
    """What stands after the colon, for lists."""
    modules: tuple[str, ...] = ()
    """Modules that must be installed."""
    install: str = ""
    """Command that installs them."""
    description: str = ""
    facts: WorldFacts | None = None

    @property
    def missing(self) -> bool:
        """True if a module is not installed; nothing is imported to find out."""
        return any(find_spec(module) is None for module in self.modules)

    def check_installed(self, name: str) -> None:
        """Check that its modules are installed; nothing is imported.

        Args:
            name: what needs them, for the error.

        Raises:
            DependencyMissing: A module is not installed.
        """
        missing = [module for module in self.modules if find_spec(module) is None]
        if missing:
            raise DependencyMissing(f"{name} needs {' and '.join(missing)}", remedy=self.install)


world_registry = Registry("agentenv.worlds", "world", of_kind(World), UnknownEnvironment)
"""The worlds of the installed packages, by prefix."""
