"""The domains of tau2 as the package inspect-evals has them, loaded without Inspect.

inspect-evals contains tau2's data, tools and scorers. Its modules import Inspect, of which they need a
dozen names (decorators, an object store, classes of messages), and toml, which Python reads itself. Here the
modules are loaded under a private name, and import small stand-ins for these names. So Inspect need not be
installed, and where it is, its own copy of the modules is not touched.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pickle
import random
import sys
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from pydantic import BaseModel, ConfigDict

from agentenv.core import DependencyMissing, ToolError

__all__ = ["DOMAINS", "Store", "check_installed", "data_folder", "module", "using"]

DOMAINS = ("retail", "airline", "telecom", "banking_knowledge")

_ROOT = "agentenv_tau2_modules"
_INSPECT = "agentenv_tau2_inspect"
_PARTS = ("", ".agent", ".dataset", ".model", ".scorer", ".solver", ".tool", ".util")


@dataclass
class Store:
    """Objects of one episode, as Inspect's store keeps them for one sample."""

    objects: dict[tuple[type, str | None], Any] = field(default_factory=dict[tuple[type, str | None], Any])
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    """Draws the ids that a domain makes, so that an episode is the same when it is played again."""


_store: ContextVar[Store] = ContextVar("agentenv_tau2_store")


@contextmanager
def using(store: Store) -> Generator[None]:
    """Let the code inside use the objects of this store."""
    token = _store.set(store)
    try:
        yield
    finally:
        _store.reset(token)


def check_installed(name: str) -> None:
    """Check that inspect-evals is installed; nothing is imported.

    Raises:
        DependencyMissing: It is not.
    """
    if importlib.util.find_spec("inspect_evals") is None:
        raise DependencyMissing(
            f"tau2:{name} needs the package inspect-evals", remedy="pip install --no-deps inspect-evals"
        )


def data_folder() -> Path:
    """Return the folder with tau2's data."""
    return _source_folder() / "data"


def module(name: str) -> Any:
    """Return a module of tau2, such as `retail.tools`."""
    _install()
    return importlib.import_module(f"{_ROOT}.{name}")


def _source_folder() -> Path:
    spec = importlib.util.find_spec("inspect_evals")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "tau2"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds tau2's modules under their private name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root, *parts = fullname.split(".")
        if root != _ROOT:
            return None
        place = _source_folder().joinpath(*parts)
        if place.is_dir():
            # What is in the packages' own __init__ is not needed.
            return importlib.util.spec_from_loader(fullname, _Loader(None), is_package=True)
        file = place.with_suffix(".py")
        if not file.exists():
            return None
        spec = importlib.util.spec_from_loader(fullname, _Loader(file), origin=str(file))
        assert spec is not None
        spec.has_location = True
        return spec


class _Loader(importlib.abc.InspectLoader):
    """Loads a module whose imports are written with the private names."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def get_source(self, fullname: str) -> str:
        if self._file is None:
            return ""
        source = self._file.read_text(encoding="utf-8")
        source = source.replace("inspect_evals.tau2", _ROOT).replace("inspect_ai", _INSPECT)
        return source.replace("\nimport toml\nimport yaml\n", f"\nfrom {_INSPECT} import toml, yaml\n")

    def is_package(self, fullname: str) -> bool:
        return self._file is None


@lru_cache(maxsize=1)
def _install() -> None:
    for part in _PARTS:
        stand_in = ModuleType(_INSPECT + part)
        stand_in.__dict__.update(_names())
        stand_in.__path__ = []
        sys.modules[_INSPECT + part] = stand_in
    sys.meta_path.append(_Finder())
    database = importlib.import_module(f"{_ROOT}.environment.db").DB
    database.load = classmethod(_load_database)
    database.get_hash = _without_collection(database.get_hash)
    ids = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{_store.get().rng.getrandbits(128):032x}"))
    telecom: Any = importlib.import_module(f"{_ROOT}.telecom.TelecomAgentTools")
    telecom.uuid = ids
    scorer: Any = importlib.import_module(f"{_ROOT}.common.scorer")
    scorer.get_expected_db = _remembered(scorer.get_expected_db)


@lru_cache(maxsize=16)
def _pickled(kind: Any, path: str) -> bytes:
    loaded = importlib.import_module(f"{_ROOT}.utils").load_file(path)
    return pickle.dumps(kind.model_validate(loaded))


def _load_database(kind: Any, path: str) -> Any:
    """Return a new copy of a database; reading and checking it takes ten times as long as copying."""
    raw = _pickled(kind, path)
    with _no_collection():
        return pickle.loads(raw)  # noqa: S301 - pickled in `_pickled`


def _without_collection(method: Callable[[Any], str]) -> Callable[[Any], str]:
    def get_hash(database: Any) -> str:
        with _no_collection():
            return method(database)

    return get_hash


@contextmanager
def _no_collection() -> Generator[None]:
    """Do not look for garbage while tens of thousands of objects are made, of which none is garbage.

    Looking for it would take four times as long as making them.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _remembered(expected: Callable[[str, Sequence[Any]], Any]) -> Callable[[str, Sequence[Any]], Any]:
    """Compute the hash of the database after the ground truth once for each task, instead of each episode."""
    hashes: dict[str, str] = {}

    def get_expected_db(domain: str, actions: Sequence[Any]) -> Any:
        key = domain + "".join(action.model_dump_json() for action in actions)
        if key not in hashes:
            hashes[key] = expected(domain, actions).db.get_hash()
        return SimpleNamespace(db=SimpleNamespace(get_hash=lambda: hashes[key]))

    return get_expected_db


# Stand-ins for the names of Inspect ---------------------------------------------------------


class _StoreModel(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    instance: str | None = None


def _store_as(kind: type[_StoreModel], instance: str | None = None) -> _StoreModel:
    objects = _store.get().objects
    if (kind, instance) not in objects:
        objects[kind, instance] = kind(instance=instance)
    return objects[kind, instance]


@dataclass
class _Message:
    content: Any = ""
    tool_calls: list[Any] | None = None

    @property
    def text(self) -> str:
        return str(self.content)


class _UserMessage(_Message):
    pass


class _AssistantMessage(_Message):
    pass


@dataclass
class _Score:
    value: str
    explanation: str | None = None


def _multi_scorer(scorers: Sequence[Any], reducer: Callable[[list[_Score]], _Score]) -> Any:
    async def score(state: Any, target: Any) -> _Score:
        return reducer(list(await asyncio.gather(*(part(state, target) for part in scorers))))

    return score


def _unchanged(function: Any) -> Any:
    return function


def _names() -> Mapping[str, Any]:
    """Return every name that tau2's modules import from Inspect."""
    unused = (
        "Agent AgentState ChatMessage ChatMessageSystem Content ContentReasoning ContentText "
        "ContentToolUse Dataset Generate GenerateConfig Model ModelOutput Sample Scorer Solver Target "
        "TaskState Tool as_solver get_model json_dataset"
    )
    return {
        **dict.fromkeys(unused.split(), Any),
        "CORRECT": "C",
        "INCORRECT": "I",
        "ChatMessageAssistant": _AssistantMessage,
        "ChatMessageSystem": _Message,
        "ChatMessageUser": _UserMessage,
        "ContentText": _Message,
        "Score": _Score,
        "StoreModel": _StoreModel,
        "ToolError": ToolError,
        "accuracy": lambda: None,
        "agent": _unchanged,
        "multi_scorer": _multi_scorer,
        "scorer": lambda metrics: _unchanged,  # pyright: ignore[reportUnknownLambdaType]
        "solver": _unchanged,
        "stderr": lambda: None,
        "store_as": _store_as,
        "toml": SimpleNamespace(load=lambda file: tomllib.loads(file.read())),  # pyright: ignore[reportUnknownLambdaType]
        "tool": _unchanged,
        "yaml": None,  # no file of tau2 is in YAML
    }
