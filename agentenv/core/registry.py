"""Things by name: those that this program registers, and those that installed packages add.

1. Packages add things through entry-point groups, each under a name. They are listed without being imported,
   and each is imported when it is first used.
2. One that cannot be imported is listed with its error and does not affect the others.
3. An entry point names the extras of its package that it needs behind its object: `module:Class [extra]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agentenv.core.errors import UsageError
from agentenv.core.installed import install_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Listing", "Registry", "of_kind"]

T = TypeVar("T")

_OF_EXTRA = re.compile(
    r"(?P<name>[\w.-]+) *(?:\[[^\]]*\])? *(?:== *(?P<version>[\w.+!]+))?"
    r".*\bextra *== *['\"](?P<extra>[\w.-]+)['\"]"
)
"""A requirement of an extra as package metadata has it, such as `toolz==1.2.0; extra == 'miniswe'`."""


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """One line of a registry's list."""

    name: str
    target: str
    """Object that the name stands for, as `module:attr`; empty if it has no such name."""
    origin: str
    """Source of the entry: `registered`, or the distribution that contains it."""
    item: T | None = None
    """The entry itself; None before it is loaded."""
    error: str = ""
    """Why the entry cannot be loaded; empty if it was loaded or not tried."""
    needs: str = ""
    """Command that installs what the entry needs besides its package; empty if nothing is missing."""


def of_kind(kind: type[T]) -> Callable[[Any, str, str], T]:
    """Return what makes the entries of a registry whose entry points name objects of one class."""

    def made(loaded: object, _name: str, value: str) -> T:
        if isinstance(loaded, kind):
            return loaded
        public = ".".join([*kind.__module__.split(".")[:2], kind.__name__])
        raise UsageError(f"{value} is {loaded!r:.200}, which is no {public}")

    return made


class Registry(Mapping[str, T]):
    """Maps names to things of one kind; those of installed packages are loaded when first looked up."""

    def __init__(
        self,
        group: str,
        noun: str,
        made: Callable[[Any, str, str], T],
        error: type[UsageError] = UsageError,
    ) -> None:
        """Make an empty registry.

        Args:
            group: the entry-point group, such as `agentenv.tools`.
            noun: what the entries are, for messages, such as `tool`.
            made: makes an entry of what an entry point names, of its name and of its value (`module:attr`).
            error: class of the errors of a lookup.
        """
        self._group, self._noun, self._made, self._error = group, noun, made, error
        self._items: dict[str, T] = {}
        self._errors: dict[str, str] = {}
        self._points: dict[str, EntryPoint] | None = None

    def __getitem__(self, name: str) -> T:
        """Return the entry of a name; its package is imported if this is its first use.

        Raises:
            UsageError: There is no such name, or its package cannot be loaded.
        """
        if name not in self._items:
            point = self._entry_points.get(name)
            if point is None:
                raise self._unknown(name)
            self._items[name] = self._loaded(point)
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items or name in self._entry_points

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._items, *self._entry_points}))

    def __len__(self) -> int:
        return len({*self._items, *self._entry_points})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._group!r}, {len(self)} entries)"

    @property
    def loaded(self) -> Mapping[str, T]:
        """Entries that are registered or loaded already."""
        return MappingProxyType(self._items)

    def remove(self, name: str) -> None:
        """Remove the entry of this name, if it is registered or loaded."""
        self._items.pop(name, None)

    def update(self, entries: Mapping[str, T]) -> None:
        """Add entries without checks; they replace those with the same names."""
        self._items.update(entries)

    def clear(self) -> None:
        """Remove every loaded entry. Tests use this, and restore the entries with `update`."""
        self._items.clear()

    def listing(self, *, load: bool = False) -> list[Listing[T]]:
        """List every entry by name; nothing is imported unless `load` is set."""
        rows: list[Listing[T]] = []
        for name in self:
            if load and name not in self._errors:
                with suppress(UsageError):  # its text is in `_errors`, and is listed below
                    self[name]
            point, item = self._entry_points.get(name), self._items.get(name)
            origin = point.dist.name if point is not None and point.dist is not None else "registered"
            error = "" if item is not None else self._errors.get(name, "")
            rows.append(Listing(name, self._target(name), origin, item, error, self.needs(name)))
        return rows

    def needs(self, name: str) -> str:
        """Return the command that installs what an entry still needs; empty if nothing is missing."""
        point = self._entry_points.get(name)
        if point is None or point.dist is None or not point.extras:
            return ""
        found = [_OF_EXTRA.match(requirement) for requirement in point.dist.requires or ()]
        lacking = any(
            match is not None
            and match["extra"] in point.extras
            and not _is_installed(match["name"], match["version"])
            for match in found
        )
        return install_line(",".join(point.extras), package=point.dist.name) if lacking else ""

    @property
    def _entry_points(self) -> dict[str, EntryPoint]:
        if self._points is None:
            from importlib.metadata import entry_points

            self._points = {point.name: point for point in entry_points(group=self._group)}
        return self._points

    def _target(self, name: str) -> str:
        point = self._entry_points.get(name)
        return point.value.partition("[")[0].strip() if point is not None else ""

    def _loaded(self, point: EntryPoint) -> T:
        try:
            made = self._made(point.load(), point.name, point.value)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
                raise
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._errors[point.name] = text
            package = point.dist.name if point.dist is not None else point.value
            raise self._error(
                f"{self._noun} {point.name!r} of package {package!r} cannot be loaded: {text}",
                remedy=self.needs(point.name),
            ) from error
        self._errors.pop(point.name, None)
        return made

    def _unknown(self, name: str) -> UsageError:
        # Not above: a sandbox runs in bare interpreters too, without the packages that `fields` needs.
        from agentenv.core.errors import did_you_mean

        return self._error(
            f"unknown {self._noun} {name!r}",
            remedy=f"{did_you_mean(name, self)} there are: {', '.join(self)}".lstrip(),
        )


def _is_installed(name: str, version: str | None) -> bool:
    from importlib import metadata

    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return version is None or installed == version
