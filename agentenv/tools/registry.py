"""The registry finds tools by name: from this program and from installed packages.

1. A name is one that `register_tool` was given, or one in the entry-point group `agentenv.tools`. `make_tool`
   also takes `module:function`.
2. Tools of installed packages are listed without being imported; each is imported when it is first used.
3. A package that cannot be imported is listed with its error and does not affect the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentenv.core.by_name import did_you_mean
from agentenv.core.errors import UnknownTool, UsageError
from agentenv.core.imports import import_object
from agentenv.tools.tool import Tool

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["ToolListing", "ToolRegistry", "make_tool", "register_tool", "tool_registry"]

ENTRY_POINT_GROUP = "agentenv.tools"


@dataclass(frozen=True, slots=True)
class ToolListing:
    """One line of the list of tools."""

    name: str
    target: str
    """Function of the tool, as `module:function`."""
    origin: str
    """Source of the tool: `registered`, or the distribution that contains it."""
    tool: Tool[..., Any] | None = None
    """The tool; None before it is loaded."""
    error: str = ""
    """Why the tool cannot be loaded; empty if it was loaded or not tried."""


class ToolRegistry(Mapping[str, Tool[..., Any]]):
    """Maps names to tools; tools of installed packages are loaded when first looked up."""

    def __init__(self, group: str = ENTRY_POINT_GROUP) -> None:
        self._group = group
        self._tools: dict[str, Tool[..., Any]] = {}
        self._plugins: dict[str, EntryPoint] | None = None
        self._errors: dict[str, str] = {}

    def add(self, name: str, tool: Tool[..., Any], *, override: bool = False) -> None:
        """Add a tool.

        Raises:
            UsageError: The name is taken by another tool, or has a colon, which `module:function` has.
        """
        if not name or ":" in name:
            raise UsageError(f"{name!r} cannot be the name of a tool", remedy="write it without a colon")
        taken = self._target_of(name)
        if taken and not override and taken != _place(tool):
            raise UsageError(
                f"tool {name!r} is registered already, as {taken}",
                remedy="choose another name, or pass override=True",
            )
        self._tools[name] = tool

    def remove(self, name: str) -> None:
        """Remove the tool of this name, if it is registered or loaded."""
        self._tools.pop(name, None)

    def __getitem__(self, name: str) -> Tool[..., Any]:
        """Return the tool of a name.

        Raises:
            UnknownTool: There is no such name, or its package cannot be loaded.
        """
        if name in self._tools:
            return self._tools[name]
        point = self._entry_points.get(name)
        if point is None:
            raise UnknownTool(
                f"unknown tool {name!r}",
                remedy=f"{did_you_mean(name, self)} the installed tools are: {', '.join(self)}".lstrip(),
            )
        self._tools[name] = self._loaded(point)
        return self._tools[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tools or name in self._entry_points

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._tools, *self._entry_points}))

    def __len__(self) -> int:
        return len({*self._tools, *self._entry_points})

    def listing(self, *, load: bool = False) -> list[ToolListing]:
        """List every tool by name; nothing is imported unless `load` is set."""
        rows: list[ToolListing] = []
        for name in self:
            if load:
                with suppress(UnknownTool):  # its text is in `_errors`, and is listed below
                    self[name]
            point = self._entry_points.get(name)
            origin = point.dist.name if point is not None and point.dist is not None else "registered"
            tool = self._tools.get(name)
            error = "" if tool is not None else self._errors.get(name, "")
            rows.append(ToolListing(name, self._target_of(name), origin, tool, error))
        return rows

    @property
    def _entry_points(self) -> dict[str, EntryPoint]:
        if self._plugins is None:
            from importlib.metadata import entry_points

            self._plugins = {point.name: point for point in entry_points(group=self._group)}
        return self._plugins

    def _target_of(self, name: str) -> str:
        if name in self._tools:
            return _place(self._tools[name])
        point = self._entry_points.get(name)
        return point.value if point is not None else ""

    def _loaded(self, point: EntryPoint) -> Tool[..., Any]:
        try:
            return _as_tool(point.load(), point.value)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
                raise
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._errors[point.name] = text
            package = point.dist.name if point.dist is not None else point.value
            raise UnknownTool(
                f"tool {point.name!r} of package {package!r} cannot be loaded: {text}"
            ) from error


tool_registry = ToolRegistry()
"""Registry of the tools of this program and of the installed packages."""


def register_tool(
    function: Callable[..., Any] | Tool[..., Any], *, name: str = "", override: bool = False
) -> Tool[..., Any]:
    """Register a tool, so that environments can name it, and return it.

    Args:
        function: a tool, or a function that is turned into one.
        name: name in the registry; the tool's own name if empty.
        override: replace a tool that has the same name.

    Raises:
        ToolDefinitionError: The function cannot be a tool.
        UsageError: The name is taken by another tool.
    """
    made = function if isinstance(function, Tool) else Tool.from_function(function)
    tool_registry.add(name or made.name, made, override=override)
    return made


def make_tool(name: str) -> Tool[..., Any]:
    """Return the tool of a name, or of `module:function`.

    Raises:
        UnknownTool: Nothing has this name, or it cannot be loaded.
        ToolDefinitionError: The function cannot be a tool.
    """
    if ":" in name:
        return _as_tool(import_object(name, UnknownTool, where="tool"), name)
    return tool_registry[name]


def _as_tool(target: Any, name: str) -> Tool[..., Any]:
    if isinstance(target, Tool):
        return target
    if not callable(target):
        raise UnknownTool(f"{name} is {target!r:.200}, which is neither a tool nor a function")
    return Tool.from_function(target)


def _place(tool: Tool[..., Any]) -> str:
    function = tool.definition.function
    module = getattr(function, "__module__", "")
    return f"{module}:{getattr(function, '__qualname__', type(function).__name__)}"
