"""Tools of other libraries as tools: their names, descriptions and schemas, and their own code for the call.

Nothing is imported to find out whose tool an object is. A tool that needs what only its own agent has is
refused, and so is one of a library that is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from agentenv.core.errors import ToolDefinitionError
from agentenv.tools.tool import Tool

__all__ = ["tool_of"]


def tool_of(entry: Any) -> Tool[..., Any]:
    """Make a tool from a function, or from a tool of another library.

    Raises:
        ToolDefinitionError: The object cannot be a tool here; the message says what to do.
    """
    registered = getattr(entry, "__registry_info__", None)
    if registered is not None and callable(entry):  # Inspect's, whose functions are all named `execute`
        return Tool.from_function(entry, name=registered.name.rpartition("/")[2])
    for kind in type(entry).__mro__:
        read = _READERS.get((kind.__module__.partition(".")[0], kind.__name__))
        if read is not None:
            return read(entry)
    try:
        return Tool.from_function(entry)
    except ToolDefinitionError as error:
        if not hasattr(entry, "description") or isinstance(entry, type):
            raise
        kind = f"{type(entry).__module__}.{type(entry).__qualname__}"
        raise ToolDefinitionError(
            f"{kind} is a tool of another library, which is not read here",
            remedy="pass its function, or Tool.from_schema(name, description, parameters, function)",
        ) from error


def _smolagents(entry: Any) -> Tool[..., Any]:
    properties = {name: {**given} for name, given in entry.inputs.items()}
    required = [name for name, given in properties.items() if not given.pop("nullable", False)]
    for given in properties.values():
        if given.get("type") == "any":
            del given["type"]
    schema = {"type": "object", "properties": properties, "required": required}

    def call(**arguments: Any) -> Any:
        return entry(**arguments)

    return Tool.from_schema(entry.name, entry.description, schema, call)


def _langchain(entry: Any) -> Tool[..., Any]:
    from langchain_core.utils.function_calling import (  # pyright: ignore[reportMissingImports]
        convert_to_openai_tool,  # pyright: ignore[reportUnknownVariableType]
    )

    async def call(**arguments: Any) -> Any:
        return await entry.ainvoke(arguments)

    function: Any = convert_to_openai_tool(entry)["function"]
    return Tool.from_schema(entry.name, entry.description, function["parameters"], call)


def _openai_agents(entry: Any) -> Tool[..., Any]:
    async def call(**arguments: Any) -> Any:
        from agents.tool_context import ToolContext  # pyright: ignore[reportMissingImports]

        text = json.dumps(arguments)
        make: Any = ToolContext
        context = make(None, tool_name=entry.name, tool_call_id="call_0", tool_arguments=text)
        return await entry.on_invoke_tool(context, text)

    return Tool.from_schema(entry.name, entry.description, entry.params_json_schema, call)


def _pydantic_ai(entry: Any) -> Tool[..., Any]:
    if entry.takes_ctx:
        raise ToolDefinitionError(
            f"the tool {entry.name} of pydantic-ai takes a RunContext, which only its agent has",
            remedy="write its function without one, or with a parameter annotated agentenv.Context",
        )
    schema = entry.function_schema

    async def call(**arguments: Any) -> Any:
        checked = schema.validator.validate_python(arguments)
        return await schema.call(checked, None)

    return Tool.from_schema(entry.name, entry.description or "", schema.json_schema, call)


def _toolset(entry: Any) -> Tool[..., Any]:
    remedy = "pass its tools: tools=[*toolset.tools.values()]"
    raise ToolDefinitionError("a toolset of pydantic-ai is not one tool", remedy=remedy)


_READERS: dict[tuple[str, str], Callable[[Any], Tool[..., Any]]] = {
    ("agents", "FunctionTool"): _openai_agents,
    ("langchain_core", "BaseTool"): _langchain,
    ("pydantic_ai", "FunctionToolset"): _toolset,
    ("pydantic_ai", "Tool"): _pydantic_ai,
    ("smolagents", "Tool"): _smolagents,
}
"""Whose tools are read: package and name of the class."""
