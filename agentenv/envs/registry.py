"""The registry: environments by id, from this program, from files and from installed packages.

1. An id is `namespace/Name-v0`. `spec`, `make` also take `path/to/file.py`, `file.py:Class`,
   `module:Class`, and what others have: `gymnasium:FrozenLake-v1`, `reasoning_gym:countdown`,
   `textarena:FrozenLake-v0`.
2. Installed packages name their environments in the entry-point group `agentenv.envs`. They are
   listed without being imported, and imported when they are first asked for.
3. A package that cannot be imported is listed with its error and disturbs no other.
"""

from __future__ import annotations

import importlib
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
from agentenv.core.limits import DonePolicy, RunLimits
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
    """Where it comes from: `registered`, or the distribution that brings it."""
    spec: EnvSpec | None = None
    """The specification, once loaded."""
    error: str = ""
    """Why it cannot be used; empty if it can, or has not been tried."""


class Registry(Mapping[str, EnvSpec]):
    """Specifications by id; those of installed packages are loaded when first looked up."""

    def __init__(self, group: str = ENTRY_POINT_GROUP) -> None:
        self._group = group
        self._specs: dict[str, EnvSpec] = {}
        self._seen: dict[str, EnvSpec] = {}
        self._plugins: dict[str, EntryPoint] | None = None
        self._errors: dict[str, str] = {}
        self._watchers: list[Callable[[str], None]] = []

    def add(self, entry: EnvSpec, *, override: bool = False) -> None:
        """Add a specification.

        Raises:
            UsageError: The id is malformed, or taken by another environment.
        """
        if not _ID.match(entry.id):
            raise UsageError(
                f"environment id {entry.id!r} is not namespace/Name-v0, as in 'shop/Math-v0' "
                "(letters, digits, _, . and -, and a version)"
            )
        taken = self._specs.get(entry.id)
        if taken is not None and not override and taken.entry_point != entry.entry_point:
            raise UsageError(
                f"environment {entry.id!r} is registered already, as {taken.entry_point}",
                remedy="choose another id or version, or pass override=True",
            )
        self._specs[entry.id] = self._seen[entry.id] = entry
        for tell in self._watchers:
            tell(entry.id)

    def remove(self, id: str) -> None:
        """Forget a registered specification, if there is one."""
        self._specs.pop(id, None)

    def update(self, entries: Mapping[str, EnvSpec]) -> None:
        """Add specifications as they are, in the place of those with the same ids."""
        self._specs.update(entries)

    def clear(self) -> None:
        """Forget every loaded specification: for tests, which put back what was there with `update`."""
        self._specs.clear()

    def watch(self, tell: Callable[[str], None]) -> None:
        """Call a function with the id of each environment added from now on."""
        self._watchers.append(tell)

    def __getitem__(self, id: str) -> EnvSpec:
        """Return the specification of an id.

        Raises:
            UnknownEnvironment: No such id, or the package that brings it cannot be loaded.
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
        """The specifications that are there without importing anything more."""
        return MappingProxyType(self._specs)

    def listing(self, *, load: bool = False) -> list[Listing]:
        """List every environment by id; nothing is imported unless `load` is set."""
        rows: list[Listing] = []
        for id in self:
            if load and id not in self._specs and id not in self._errors:
                with suppress(UnknownEnvironment):  # its text is kept in `_errors`, and listed below
                    self[id]
            point = self._entry_points.get(id)
            origin = point.dist.name if point is not None and point.dist is not None else "registered"
            found = self._specs.get(id)
            rows.append(Listing(id, origin, found, "" if found is not None else self._errors.get(id, "")))
        return rows

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
                # A module registers once, when it is imported; what it said then holds still.
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
        versions = [one for one in known if match and one.rpartition("-v")[0] == id.rpartition("-v")[0]]
        close = versions or _closest(id, known)
        meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        return UnknownEnvironment(
            f"unknown environment {id!r}", remedy=f"{meant}(`agentenv list` shows all {len(known)})"
        )


def _closest(id: str, known: Sequence[str]) -> list[str]:
    """Return near misses, without regard to case, and by the name alone if the namespace is off."""
    whole = {one.lower(): one for one in known}
    bare = {one.partition("/")[2].rpartition("-v")[0].lower(): one for one in known}
    name = id.rpartition("/")[2].lower()
    name = name.rpartition("-v")[0] or name
    found = [
        *(whole[near] for near in nearest(id.lower(), whole, cutoff=0.7)),
        *(bare[near] for near in nearest(name, bare, cutoff=0.7)),
    ]
    return list(dict.fromkeys(found))


registry = Registry()
"""The environments of this program and of the installed packages."""


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
        id: `namespace/Name-v0`.
        entry_point: an environment class, a function that makes one, or `"module:attr"`.
        tasks: anything that `TaskSet.of` takes; the class's own `tasks` if None.
        rewards: reward functions added to the environment's own reward; each a function, a
            function with its weight, or an `ae.Reward`.
        max_turns: limit of assistant turns; shorthand for the field of `limits`.
        limits: limits of an episode; the stricter of these and the run's hold.
        kwargs: arguments of the entry point; those of `make` win.
        user: a simulated user (`ae.User`), or a function of the task that gives one.
        done_policy: `"stop"` ends the episode when `is_done()` is true; `"explain"` tells the
            model and lets it answer once more.
        sandbox: name of the sandbox that episodes need (`"auto"`, `"local"`, `"e2b"`).
        description: one line for lists.
        override: replace an environment of the same id.

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
    registry.add(entry, override=override or _is_reload(entry))
    return entry


def spec(id: str | EnvSpec) -> EnvSpec:
    """Return the specification that an id, a file or a module names.

    Raises:
        UnknownEnvironment: Nothing has this name, or several things have.
    """
    if isinstance(id, EnvSpec):
        return id
    if id in registry:
        return registry[id]
    peer, _, name = id.partition(":")
    if peer in PEERS:
        return PEERS[peer](name)
    source, _, attribute = id.partition(":")
    if source.endswith(".py"):
        files = importlib.import_module("agentenv.envs.files")
        return _choose(files.load_file(source), attribute, id)
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
    """A class defined anew under the same name and module (a notebook cell, a reload) replaces itself."""
    taken = registry.loaded.get(entry.id)
    return taken is not None and taken.entry_point == entry.entry_point


def _import(module: str, id: str) -> str:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(f"{missing}."):
            raise UnknownEnvironment(f"environment {id!r}: no module {module!r} can be imported") from error
        raise
    return module


def _choose(module: str, attribute: str, id: str) -> EnvSpec:
    """Return the one specification that a loaded module offers under `attribute`, or at all."""
    registered = [entry for entry in registry.loaded.values() if entry.module == module]
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
                f"{id} registers no environment and defines no class of one",
                remedy="write a class of agentenv.Env or agentenv.ToolEnv, and register it",
            )
        found = ", ".join(f"{id}:{one.__name__}" for one in classes)
        raise UnknownEnvironment(f"{id} defines {len(classes)} environments", remedy=f"choose one: {found}")
    for entry in registered:
        if attribute in (entry.id, entry.attribute):
            return entry
    if _ID.match(attribute) and attribute in registry:
        return registry[attribute]
    target = getattr(sys.modules[module], attribute, None)
    if target is None:
        offers = [one.__name__ for one in _env_classes(module)] + [entry.id for entry in registered]
        meant = did_you_mean(attribute, offers)
        known = f"there are: {', '.join(offers) or 'none'}"
        raise UnknownEnvironment(
            f"{id}: there is no {attribute!r}", remedy=f"{meant} ({known})" if meant else known
        )
    return _spec_of(target, _made_up_id(target), "")


def _env_classes(module: str) -> list[type]:
    from agentenv.envs.env import Env

    found = [
        value
        for value in vars(sys.modules[module]).values()
        if isinstance(value, type) and issubclass(value, Env) and value.__module__ == module
    ]
    return list(dict.fromkeys(found))


def _made_up_id(target: object) -> str:
    name = re.sub(r"\W", "", getattr(target, "__name__", type(target).__name__)) or "Env"
    return f"local/{name}-v0"


def _spec_of(target: Any, id: str, entry_point: str) -> EnvSpec:
    """Make a specification from what an entry point or an attribute holds."""
    if isinstance(target, EnvSpec):
        return target if not entry_point or target.id == id else replace(target, id=id)
    if not callable(target):
        raise UsageError(f"{entry_point or id} is {target!r:.200}, neither an environment nor an EnvSpec")
    return EnvSpec.of(id, entry_point or target)
