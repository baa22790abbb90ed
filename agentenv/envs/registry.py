"""The registry finds environments by id: from this program, from files and from installed packages.

An id is `namespace/Name-v0`. `spec` and `make` also take `path/to/file.py`, `file.py:Class`, `module:Class`,
and names in worlds (`agentenv.envs.worlds`) such as `gymnasium:FrozenLake-v1` and `bfcl:multi_turn_base`.
Installed packages name their environments in the entry-point group `agentenv.envs`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from agentenv.core.errors import UnknownEnvironment, UsageError, did_you_mean, nearest
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.registry import Registry
from agentenv.envs.advice import tell_once
from agentenv.envs.found import OURS, inspect_tasks, kind_of, others_in, playable_in
from agentenv.envs.spec import EnvSpec
from agentenv.envs.worlds import world_registry

if TYPE_CHECKING:
    from agentenv.envs.env import Env
    from agentenv.envs.front import Front

    AnyEnv = TypeVar("AnyEnv", bound=Env)

__all__ = ["EnvRegistry", "EnvSpec", "make", "register", "registry", "spec"]

_ID = re.compile(r"^(?P<namespace>[\w.-]+)/(?P<name>[\w.-]+?)-v(?P<version>\d+)$")


class EnvRegistry(Registry[EnvSpec]):
    """Maps ids to specifications; environments of installed packages are loaded when first looked up."""

    def __init__(self, group: str = "agentenv.envs") -> None:
        super().__init__(group, "environment", self._spec_again, UnknownEnvironment)
        self._seen: dict[str, EnvSpec] = {}
        self._registrars: dict[str, str] = {}
        self._registered_in: dict[str, ModuleType | None] = {}
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
        taken = self._items.get(entry.id)
        if taken is not None and not override and taken.entry_point != entry.entry_point:
            raise UsageError(
                f"environment {entry.id!r} is registered already, as {taken.entry_point}",
                remedy="choose another id or version, or pass override=True",
            )
        self._items[entry.id] = self._seen[entry.id] = entry
        self._registrars[entry.id] = registrar
        self._registered_in[entry.id] = sys.modules.get(registrar)
        for tell in self._watchers:
            tell(entry.id)

    def watch(self, tell: Callable[[str], None]) -> None:
        """Call a function with the id of each environment added from now on."""
        self._watchers.append(tell)

    def of_module(self, module: str) -> list[EnvSpec]:
        """Return the loaded specifications that a module defines, or registers for another one.

        Those that a file registered before it was changed and read again are left out.
        """
        return [entry for entry in self._items.values() if self._is_of(entry, module)]

    def _is_of(self, entry: EnvSpec, module: str) -> bool:
        if self._registrars.get(entry.id) == module:
            return self._registered_in[entry.id] is sys.modules.get(module)
        return entry.module == module

    def registrar(self, id: str) -> str:
        """Return the module that registered an environment; empty if it comes from an installed package."""
        return self._registrars.get(id, "")

    def _spec_again(self, loaded: Any, id: str, value: str) -> EnvSpec:
        """Return the specification of an entry point whose object was just loaded.

        A module registers its environment once, when it is imported. If the registry was cleared since then,
        the specification of that time is used again.
        """
        if id not in self._items:
            self.add(self._seen.get(id) or _spec_of(loaded, id, value))
        return self._items[id]

    def _unknown(self, name: str) -> UnknownEnvironment:
        known = list(self)
        match = _ID.match(name)
        bare = name.rpartition("-v")[0]
        versions = [other for other in known if match and other.rpartition("-v")[0] == bare]
        close = versions or [
            *_closest(name, known),
            *([f"{name}.py"] if Path(f"{name}.py").is_file() else []),
        ]
        meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        return UnknownEnvironment(
            f"unknown environment {name!r}",
            remedy=f"{meant}`agentenv list` shows all {len(known)}; a file is named by its path",
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


registry = EnvRegistry()
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
        user: a simulated user (`ae.User`), or a function of the task that returns one. It answers the texts
            of the model to which `step` returns no message.
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
    if not isinstance(cast("object", id), str):
        raise UsageError(
            f"an environment is named by an id, a file or an EnvSpec, not by {id!r:.80}",
            remedy="register a class and name it by its id: ae.register('you/Name-v0', Class, tasks=[...])",
        )
    if id in registry:
        return registry[id]
    source, colon, attribute = id.partition(":")
    if source.endswith(".py"):
        from agentenv.core.imports import load_file  # most environments are named by their id

        return _choose(load_file(source, UnknownEnvironment), attribute, id)
    if colon and source in world_registry:
        return world_registry[source].spec(attribute)
    if attribute and not _ID.match(id):
        return _choose(_import(source, id), attribute, id)
    return registry[id]


@overload
def make(id: str | EnvSpec, **kwargs: Any) -> Front[Env]: ...
@overload
def make(id: Callable[..., AnyEnv], **kwargs: Any) -> Front[AnyEnv]: ...
def make(id: str | EnvSpec | Callable[..., Env], **kwargs: Any) -> Front[Env]:
    """Make an environment for a user of Gymnasium, from its id, file, specification or class.

    The result has Gymnasium's `reset`, `step` and `close`; its attribute `unwrapped` is the author's object.

    Raises:
        UnknownEnvironment: Nothing has this name.
        UsageError: The environment refuses the arguments.
    """
    from agentenv.envs.front import Front

    entry = spec(id) if isinstance(id, str | EnvSpec) else _spec_of(id, _made_up_id(id), "")
    return Front(entry.make(**kwargs))


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
            raise UnknownEnvironment(
                f"environment {id!r}: there is no module and no world {module!r}",
                remedy=did_you_mean(module, world_registry),
            ) from error
        raise
    return module


def _choose(module: str, attribute: str, id: str) -> EnvSpec:
    """Return the specification that `attribute` names in a loaded module, or the module's only one."""
    registered = registry.of_module(module)
    if not attribute:
        return _only(module, registered, id)
    for entry in registered:
        if attribute in (entry.id, entry.attribute):
            return entry
    if _ID.match(attribute) and attribute in registry:
        return registry[attribute]
    if attribute in inspect_tasks(module):
        return world_registry["inspect"].spec(f"{id.removesuffix(f':{attribute}')}@{attribute}")
    target = getattr(sys.modules[module], attribute, None)
    if target is None:
        offers = [cls.__name__ for cls in playable_in(module)] + [entry.id for entry in registered]
        meant = did_you_mean(attribute, offers)
        known = f"there are: {', '.join(offers) or 'none'}"
        raise UnknownEnvironment(
            f"{id}: there is no {attribute!r}", remedy=f"{meant} ({known})" if meant else known
        )
    return _spec_of(target, _made_up_id(target), "")


def _only(module: str, registered: list[EnvSpec], id: str) -> EnvSpec:
    """Return the only environment of a loaded module, or the only one of another library's."""
    if len(registered) == 1:
        return registered[0]
    if registered:
        names = ", ".join(f"{id}:{entry.id}" for entry in registered)
        raise UnknownEnvironment(
            f"{id} registers {len(registered)} environments", remedy=f"choose one: {names}"
        )
    classes = playable_in(module)
    if len(classes) == 1:
        if (kind := kind_of(classes[0])) != OURS:
            tell_once(classes[0], "%s: plays %s, %s", id, classes[0].__name__, kind)
        return _spec_of(classes[0], _made_up_id(classes[0]), "")
    if not classes and len(tasks := inspect_tasks(module)) == 1:
        return world_registry["inspect"].spec(f"{id}@{tasks[0]}")
    if not classes:
        others = "; ".join(others_in(module, id))
        raise UnknownEnvironment(
            f"{id} neither registers an environment nor defines an environment class"
            + (f", but it has {others}" if others else ""),
            remedy="write a subclass of agentenv.Env or agentenv.ToolEnv, and register it",
        )
    names = ", ".join(f"{id}:{cls.__name__} ({kind_of(cls)})" for cls in classes)
    raise UnknownEnvironment(f"{id} defines {len(classes)} environments", remedy=f"choose one: {names}")


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
