"""The registry finds environments by id: from this program, from files and from installed packages.

1. An id is `namespace/Name-v0`. `spec` and `make` also take `path/to/file.py`, `file.py:Class`,
   `module:Class`, and names in other libraries, for example `gymnasium:FrozenLake-v1`,
   `reasoning_gym:countdown` and `textarena:FrozenLake-v0`.
2. Installed packages name their environments in the entry-point group `agentenv.envs`. The registry lists
   them without importing them, and imports each when it is first used.
3. A package that cannot be imported is listed with its error and does not affect the others.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentenv.core.by_name import did_you_mean, nearest
from agentenv.core.errors import UnknownEnvironment, UsageError
from agentenv.core.files import load_file
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.envs.extras import install_command
from agentenv.envs.peers import PEERS
from agentenv.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentenv.envs.env import Env

__all__ = ["EnvSpec", "Listing", "Registry", "make", "register", "registry", "spec"]

ENTRY_POINT_GROUP = "agentenv.envs"

_ID = re.compile(r"^(?P<namespace>[\w.-]+)/(?P<name>[\w.-]+?)-v(?P<version>\d+)$")


@dataclass(frozen=True, slots=True)
class Listing:
    """One line of the list of environments."""

    id: str
    origin: str
    """Source of the environment: `registered`, or the distribution that contains it."""
    spec: EnvSpec | None = None
    """Specification of the environment; None before it is loaded."""
    error: str = ""
    """Why the environment cannot be loaded; empty if it was loaded or not tried."""
    needs: str = ""
    """Command that installs what the environment needs besides its package; empty if nothing is missing."""


class Registry(Mapping[str, EnvSpec]):
    """Maps ids to specifications; environments of installed packages are loaded when first looked up."""

    def __init__(self, group: str = ENTRY_POINT_GROUP) -> None:
        self._group = group
        self._specs: dict[str, EnvSpec] = {}
        self._seen: dict[str, EnvSpec] = {}
        self._registrars: dict[str, str] = {}
        self._plugins: dict[str, EntryPoint] | None = None
        self._errors: dict[str, str] = {}
        self._watchers: list[Callable[[str], None]] = []

    def add(self, entry: EnvSpec, *, override: bool = False, registrar: str = "") -> None:
        """Add a specification.

        Args:
            entry: the specification.
            override: replace an environment that has the same id.
            registrar: name of the module that registers it, which may differ from the one that defines it.

        Raises:
            UsageError: The id is malformed, or taken by another environment.
        """
        if not _ID.match(entry.id):
            raise UsageError(
                f"environment id {entry.id!r} does not have the form namespace/Name-v0",
                remedy="use letters, digits, _, . and -, and a version, as in 'shop/Math-v0'",
            )
        taken = self._specs.get(entry.id)
        if taken is not None and not override and taken.entry_point != entry.entry_point:
            raise UsageError(
                f"environment {entry.id!r} is registered already, as {taken.entry_point}",
                remedy="choose another id or version, or pass override=True",
            )
        self._specs[entry.id] = self._seen[entry.id] = entry
        self._registrars[entry.id] = registrar
        for tell in self._watchers:
            tell(entry.id)

    def remove(self, id: str) -> None:
        """Remove the specification of this id, if there is one."""
        self._specs.pop(id, None)

    def update(self, entries: Mapping[str, EnvSpec]) -> None:
        """Add specifications without checks; they replace those with the same ids."""
        self._specs.update(entries)

    def clear(self) -> None:
        """Remove every loaded specification. Tests use this, and restore the specifications with `update`."""
        self._specs.clear()

    def watch(self, tell: Callable[[str], None]) -> None:
        """Call a function with the id of each environment added from now on."""
        self._watchers.append(tell)

    def __getitem__(self, id: str) -> EnvSpec:
        """Return the specification of an id.

        Raises:
            UnknownEnvironment: There is no such id, or its package cannot be loaded.
        """
        if id not in self._specs and id in self._entry_points:
            self._load(self._entry_points[id])
        if id not in self._specs:
            raise self._unknown(id)
        return self._specs[id]

    def __contains__(self, id: object) -> bool:
        return id in self._specs or id in self._entry_points

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._specs, *self._entry_points}))

    def __len__(self) -> int:
        return len({*self._specs, *self._entry_points})

    def __repr__(self) -> str:
        return f"Registry({', '.join(self)})"

    @property
    def loaded(self) -> Mapping[str, EnvSpec]:
        """Specifications that are loaded already."""
        return MappingProxyType(self._specs)

    def listing(self, *, load: bool = False) -> list[Listing]:
        """List every environment by id; nothing is imported unless `load` is set."""
        rows: list[Listing] = []
        for id in self:
            if load and id not in self._specs and id not in self._errors:
                with suppress(UnknownEnvironment):  # its text is in `_errors`, and is listed below
                    self[id]
            point = self._entry_points.get(id)
            origin = point.dist.name if point is not None and point.dist is not None else "registered"
            entry = self._specs.get(id)
            error = "" if entry is not None else self._errors.get(id, "")
            rows.append(Listing(id, origin, entry, error, "" if point is None else install_command(point)))
        return rows

    def of_module(self, module: str) -> list[EnvSpec]:
        """Return the loaded specifications that a module defines, or registers for another one."""
        return [
            entry
            for entry in self._specs.values()
            if module in (entry.module, self._registrars.get(entry.id))
        ]

    def registrar(self, id: str) -> str:
        """Return the module that registered an environment; empty if it comes from an installed package."""
        return self._registrars.get(id, "")

    def rescan(self) -> None:
        """Look for installed packages again."""
        self._plugins = None
        self._errors.clear()

    @property
    def _entry_points(self) -> dict[str, EntryPoint]:
        if self._plugins is None:
            self._plugins = {point.name: point for point in entry_points(group=self._group)}
        return self._plugins

    def _load(self, point: EntryPoint) -> None:
        try:
            loaded = point.load()
            if point.name not in self._specs:
                # A module registers its environment once, when it is imported. If the registry was cleared
                # since then, the specification of that time is used again.
                self.add(self._seen.get(point.name) or _spec_of(loaded, point.name, point.value))
            self._errors.pop(point.name, None)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
                raise
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._errors[point.name] = text
            package = point.dist.name if point.dist is not None else point.value
            raise UnknownEnvironment(
                f"environment {point.name!r} of package {package!r} cannot be loaded: {text}"
            ) from error

    def _unknown(self, id: str) -> UnknownEnvironment:
        known = list(self)
        match = _ID.match(id)
        name = id.rpartition("-v")[0]
        versions = [other for other in known if match and other.rpartition("-v")[0] == name]
        close = versions or _closest(id, known)
        meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        return UnknownEnvironment(
            f"unknown environment {id!r}", remedy=f"{meant}(`agentenv list` shows all {len(known)})"
        )


def _closest(id: str, known: Sequence[str]) -> list[str]:
    """Return similar ids, ignoring case; the name alone is also compared, without the namespace."""
    whole = {other.lower(): other for other in known}
    bare = {other.partition("/")[2].rpartition("-v")[0].lower(): other for other in known}
    name = id.rpartition("/")[2].lower()
    name = name.rpartition("-v")[0] or name
    matches = [
        *(whole[near] for near in nearest(id.lower(), whole, cutoff=0.7)),
        *(bare[near] for near in nearest(name, bare, cutoff=0.7)),
    ]
    return list(dict.fromkeys(matches))


registry = Registry()
"""Registry of the environments of this program and of the installed packages."""


def register(
    id: str,
    entry_point: str | Callable[..., Any],
    *,
    tasks: object = None,
    rewards: Sequence[Any] = (),
    max_turns: int | None = None,
    limits: RunLimits | None = None,
    kwargs: Mapping[str, Any] | None = None,
    user: object = None,
    done_policy: DonePolicy = "stop",
    sandbox: str | None = None,
    description: str = "",
    override: bool = False,
) -> EnvSpec:
    """Register an environment and return its specification.

    Args:
        id: id of the form `namespace/Name-v0`.
        entry_point: an environment class, a function that makes an environment, or `"module:attr"`.
        tasks: anything that `TaskSet.of` takes; None means the class's own `tasks`.
        rewards: rewards added to the environment's own reward. Each is a function, a pair of a function and
            its weight, or an `ae.Reward`.
        max_turns: limit of assistant turns; short for this field of `limits`.
        limits: limits of an episode; the stricter of these and the run's apply.
        kwargs: arguments of the entry point; arguments of `make` override them.
        user: a simulated user (`ae.User`), or a function of the task that returns one.
        done_policy: `"stop"` ends the episode when `is_done()` is true; `"explain"` tells the
            model and lets it answer once more.
        sandbox: name of the sandbox that episodes need (`"auto"`, `"local"`, `"e2b"`).
        description: one line for lists of environments.
        override: replace an environment that has the same id.

    Raises:
        UsageError: The id is malformed or taken, or an argument cannot be used.
    """
    entry = EnvSpec.of(
        id,
        entry_point,
        tasks=tasks,
        rewards=rewards,
        limits=limits,
        max_turns=max_turns,
        kwargs=kwargs,
        user=user,
        done_policy=done_policy,
        sandbox=sandbox,
        description=description,
    )
    frame = inspect.currentframe()
    caller = frame.f_back if frame is not None else None
    registrar = caller.f_globals.get("__name__", "") if caller is not None else ""
    registry.add(entry, override=override or _is_reload(entry), registrar=registrar)
    return entry


def spec(id: str | EnvSpec) -> EnvSpec:
    """Return the specification that an id, a file or a module names.

    Raises:
        UnknownEnvironment: Nothing has this name, or several environments have it.
    """
    if isinstance(id, EnvSpec):
        return id
    if id in registry:
        return registry[id]
    peer, _, name = id.partition(":")
    if peer in PEERS:
        return PEERS[peer].spec(name)
    source, _, attribute = id.partition(":")
    if source.endswith(".py"):
        return _choose(load_file(source, UnknownEnvironment), attribute, id)
    if attribute and not _ID.match(id):
        return _choose(_import(source, id), attribute, id)
    return registry[id]


def make(id: str | EnvSpec, **kwargs: Any) -> Env:
    """Make an environment from an id, a file or a specification.

    Raises:
        UnknownEnvironment: Nothing has this name.
        UsageError: The environment refuses the arguments.
    """
    return spec(id).make(**kwargs)


def _is_reload(entry: EnvSpec) -> bool:
    """Return whether this is a new definition of the same class, for example in a reloaded module.

    Such a definition replaces the old one without `override=True`.
    """
    taken = registry.loaded.get(entry.id)
    return taken is not None and taken.entry_point == entry.entry_point


def _import(module: str, id: str) -> str:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(f"{missing}."):
            raise UnknownEnvironment(f"environment {id!r}: there is no module {module!r}") from error
        raise
    return module


def _choose(module: str, attribute: str, id: str) -> EnvSpec:
    """Return the specification that `attribute` names in a loaded module, or the module's only one."""
    registered = registry.of_module(module)
    if not attribute:
        if len(registered) == 1:
            return registered[0]
        if registered:
            names = ", ".join(f"{id}:{entry.id}" for entry in registered)
            raise UnknownEnvironment(
                f"{id} registers {len(registered)} environments", remedy=f"choose one: {names}"
            )
        classes = _env_classes(module)
        if len(classes) == 1:
            return _spec_of(classes[0], _made_up_id(classes[0]), "")
        if not classes:
            raise UnknownEnvironment(
                f"{id} neither registers an environment nor defines an environment class",
                remedy="write a subclass of agentenv.Env or agentenv.ToolEnv, and register it",
            )
        names = ", ".join(f"{id}:{cls.__name__}" for cls in classes)
        raise UnknownEnvironment(f"{id} defines {len(classes)} environments", remedy=f"choose one: {names}")
    for entry in registered:
        if attribute in (entry.id, entry.attribute):
            return entry
    if _ID.match(attribute) and attribute in registry:
        return registry[attribute]
    target = getattr(sys.modules[module], attribute, None)
    if target is None:
        offers = [cls.__name__ for cls in _env_classes(module)] + [entry.id for entry in registered]
        meant = did_you_mean(attribute, offers)
        known = f"there are: {', '.join(offers) or 'none'}"
        raise UnknownEnvironment(
            f"{id}: there is no {attribute!r}", remedy=f"{meant} ({known})" if meant else known
        )
    return _spec_of(target, _made_up_id(target), "")


def _env_classes(module: str) -> list[type]:
    from agentenv.envs.env import Env

    classes = [
        value
        for value in vars(sys.modules[module]).values()
        if isinstance(value, type) and issubclass(value, Env) and value.__module__ == module
    ]
    return list(dict.fromkeys(classes))


def _made_up_id(target: object) -> str:
    name = re.sub(r"\W", "", getattr(target, "__name__", type(target).__name__)) or "Env"
    return f"local/{name}-v0"


def _spec_of(target: Any, id: str, entry_point: str) -> EnvSpec:
    """Make a specification from the object that an entry point or an attribute names."""
    if isinstance(target, EnvSpec):
        return target if not entry_point or target.id == id else replace(target, id=id)
    if not callable(target):
        raise UsageError(
            f"{entry_point or id} is {target!r:.200}, which is neither an environment nor an EnvSpec"
        )
    return EnvSpec.of(id, entry_point or target)
