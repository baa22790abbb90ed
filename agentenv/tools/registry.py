"""The registry finds tools by name: from this program and from the entry-point group `agentenv.tools`.

`make_tool` also takes `module:function`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentenv.core.errors import UnknownTool, UsageError
from agentenv.core.imports import import_object
from agentenv.core.registry import Registry
from agentenv.tools.tool import Tool

__all__ = ["ToolRegistry", "make_tool", "register_tool", "tool_registry"]


class ToolRegistry(Registry[Tool[..., Any]]):
    """Maps names to tools; tools of installed packages are loaded when first looked up."""

    def __init__(self, group: str = "agentenv.tools") -> None:
        super().__init__(group, "tool", lambda target, _, value: _as_tool(target, value), UnknownTool)

    def add(self, name: str, tool: Tool[..., Any], *, override: bool = False) -> None:
        """Add a tool.

        Raises:
            UsageError: The name is taken by another tool, or has a colon, which `module:function` has.
        """
        if not name or ":" in name:
            raise UsageError(f"{name!r} cannot be the name of a tool", remedy="write it without a colon")
        taken = self._target(name)
        if taken and not override and taken != _place(tool):
            raise UsageError(
                f"tool {name!r} is registered already, as {taken}",
                remedy="choose another name, or pass override=True",
            )
        self._items[name] = tool

    def _target(self, name: str) -> str:
        return _place(self._items[name]) if name in self._items else super()._target(name)


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
    try:
        return tool_registry[name]
    except UnknownTool as error:
        remedy = (
            f"{error.remedy}; a tool of your own stands there itself and not by its name: tools = (find,)"
        )
        raise UnknownTool(error.message, remedy=remedy) from error.__cause__


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
