"""The libraries of the tasks, and the index of the mistakes that can be put into them.

An index is a JSON file for one version of one library. It names files with their checksums, places of
changes, and examples that show each change, by number. The text of the library comes from the installed
package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from agentenv.core import DependencyMissing, TaskError
from agentenv_envs.mini_swe.changes import Change
from agentenv_envs.mini_swe.examples import Session, sessions_of

__all__ = ["INDEXES", "Fault", "Library", "Part", "checksum", "libraries", "module_of", "sources_of"]

INDEXES = str(Path(__file__).with_name("indexes"))
"""Folder with the indexes of the bundled tasks."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A change of a file, and an example that shows it."""

    change: Change
    session: str
    example: int
    """Number of the example in its session, counted from 0."""


@dataclass(frozen=True, slots=True)
class Part:
    """A file of a library that has tasks."""

    path: str
    checksum: str
    left_out: frozenset[str]
    """Sessions, and examples as `SESSION.EXAMPLE`, that do not show the same each time or take long."""
    faults: tuple[Fault, ...]

    @property
    def module(self) -> str:
        """Name by which the file is imported."""
        return module_of(self.path)


@dataclass(frozen=True)
class Library:
    """A version of a library, with its index."""

    name: str
    version: str
    licence: str
    split: str
    """Split that has the library's tasks."""
    parts: Mapping[str, Part]
    recorded: dict[str, list[list[str]]] = field(default_factory=dict[str, list[list[str]]], compare=False)
    """What the sessions of a file show, by its path; recorded when it is first needed in this process."""

    def __deepcopy__(self, memo: dict[int, object]) -> Library:
        """Return the same object, which does not change."""
        return self

    @classmethod
    def read(cls, file: Path) -> Library:
        """Read an index."""
        content = json.loads(file.read_text(encoding="utf-8"))
        parts = {path: _part(path, part) for path, part in content.pop("files").items()}
        return cls(**content, parts=parts)

    @property
    def missing(self) -> str:
        """What is wrong with the installed package; empty if it is this version."""
        try:
            installed = metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return f"{self.name} {self.version} is not installed"
        return "" if installed == self.version else f"{self.name} is {installed} instead of {self.version}"

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """Texts of the library's Python files, by path.

        Raises:
            DependencyMissing: The library is not installed in this version.
            TaskError: A file with tasks is not the published one.
        """
        if self.missing:
            raise DependencyMissing(
                f"the tasks are made from {self.name} {self.version}, but {self.missing}",
                remedy=f"pip install '{self.name}=={self.version}'",
            )
        sources = sources_of(metadata.distribution(self.name))
        for path, part in self.parts.items():
            if checksum(sources.get(path, "")) != part.checksum:
                raise TaskError(
                    f"{path} of the installed {self.name} {self.version} is not the published file",
                    remedy=f"pip install --force-reinstall --no-deps '{self.name}=={self.version}'",
                )
        return sources

    def sessions(self, part: Part) -> Sequence[Session]:
        """Return the sessions that are hidden tests of a file."""
        return _sessions(self.sources[part.path], part.left_out)


@lru_cache(maxsize=256)
def _sessions(source: str, left_out: frozenset[str]) -> Sequence[Session]:
    return [session for session in sessions_of(source) if session.name not in left_out]


@lru_cache(maxsize=16)
def libraries(folder: str = INDEXES) -> Mapping[str, Library]:
    """Return the libraries whose indexes are in a folder, by name."""
    found = [Library.read(file) for file in sorted(Path(folder).glob("*.json"))]
    return {library.name: library for library in found}


def sources_of(distribution: metadata.Distribution) -> dict[str, str]:
    """Return the texts of an installed distribution's Python files without its tests, by path."""
    return dict(_python_files(distribution))


def _python_files(distribution: metadata.Distribution) -> Iterator[tuple[str, str]]:
    for file in distribution.files or ():
        hidden = file.parts[0] == ".." or {"test", "tests"} & set(file.parts)
        if file.suffix == ".py" and not hidden and not file.name.startswith("test_"):
            yield file.as_posix(), Path(str(file.locate())).read_text(encoding="utf-8")


def checksum(source: str) -> str:
    """Return the checksum of a file's text."""
    return sha256(source.encode()).hexdigest()[:16]


def module_of(path: str) -> str:
    """Return the name by which a file is imported."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _part(path: str, content: Mapping[str, Any]) -> Part:
    faults = (Fault(Change(*place), session, example) for *place, session, example in content["faults"])
    return Part(path, content["checksum"], frozenset(content["left_out"]), tuple(faults))
