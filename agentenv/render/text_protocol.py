"""Describe, call and answer tools in plain text, for templates that have no place for tools.

The system message says how to call a tool and lists the tools; a call is
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in the model's text; results come back in
a user turn as `<tool_response>...</tool_response>`. The text is short, because small models must be
able to follow it, and depends on the tools alone.

1. A tool has one line. Below it stand the descriptions of its arguments and of their fields, except for
   a tool with one plain argument: the tool's own line says what that argument is for.
2. A nested type that the schema names has a line of its own, so that recursive types have an end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentenv.core.messages import ArgumentError, ToolCallMessage, chat_call, decode
from agentenv.render.tail import Plain

__all__ = ["TextProtocol", "describe_tool"]

_TYPES = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "array": "list",
    "object": "dict",
    "null": "None",
}
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_NESTED = {"array", "object"}
_CONSTRAINTS = {
    "format": "{}",
    "pattern": "matches {}",
    "minimum": ">= {}",
    "exclusiveMinimum": "> {}",
    "maximum": "<= {}",
    "exclusiveMaximum": "< {}",
    "multipleOf": "multiple of {}",
}
"""How a keyword of JSON Schema that narrows a plain type is written behind the type."""


@dataclass(frozen=True, slots=True)
class TextProtocol:
    """How tools are described to a model in plain text; pass a changed one to a renderer as `protocol`."""

    describe: Callable[[Sequence[Mapping[str, object]]], str] | None = None
    """Function that makes the system text from the tool schemas; the built-in text if None."""

    def system_text(self, tools: Sequence[Mapping[str, object]]) -> str:
        """Return the text of the system message that describes the tools."""
        if self.describe is not None:
            return self.describe(tools)
        if not tools:
            return ""
        name, parameters = _function(tools[0])
        example = ", ".join(f'"{key}": ...' for key in _properties(parameters))
        call = f'<tool_call>{{"name": "{name}", "arguments": {{{example}}}}}</tool_call>'
        lines = [describe_tool(tool) for tool in tools]
        return "\n".join([f"To call a tool, write {call}", "Tools:", *lines])

    def plain(
        self,
        messages: Sequence[Plain],
        tools: Sequence[Mapping[str, object]],
        *,
        system_role: bool,
        opening: bool,
    ) -> list[Plain]:
        """Return the messages without tool calls and tool messages.

        Args:
            messages: messages in the form of a template, already safe to render.
            tools: tool schemas, already safe to render.
            system_role: whether the template has system messages; if not, the description goes into
                the first user message.
            opening: whether the conversation starts with these messages, so that the tools are described.
        """
        turns: list[Plain] = []
        for message in messages:
            self._add(turns, message)
        text = self.system_text(tools) if opening and tools else ""
        if not text:
            return turns
        role = "system" if system_role else "user"
        if turns and turns[0]["role"] == role:
            first = str(turns[0].get("content") or "")
            joined = f"{first}\n{text}" if role == "system" else f"{text}\n\n{first}"
            return [{**turns[0], "content": joined}, *turns[1:]]
        return [{"role": role, "content": text}, *turns]

    @staticmethod
    def calls_in(text: str) -> tuple[str, list[ToolCallMessage]]:
        """Return a text without its valid calls, and these calls; what is left of a broken one stays."""
        calls: list[ToolCallMessage] = []

        def read(match: re.Match[str]) -> str:
            try:
                written = decode(match.group(1))
                name, arguments = str(written["name"]), json.dumps(written.get("arguments", {}))
            except (ArgumentError, KeyError):
                return match.group(0)
            calls.append(chat_call(f"call_{len(calls)}", name, arguments))
            return ""

        return _CALL.sub(read, text).strip(), calls

    def _add(self, turns: list[Plain], message: Plain) -> None:
        role = message["role"]
        content = str(message.get("content") or "")
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            role = "user"
        elif role == "assistant":
            calls = [
                self._call(entry) for entry in cast("list[dict[str, Any]]", message.get("tool_calls") or [])
            ]
            content = "\n".join([*([content] if content or not calls else []), *calls])
        if role == "user" and turns and turns[-1]["role"] == "user":
            turns[-1] = {"role": "user", "content": f"{turns[-1]['content']}\n{content}"}
        else:
            rest = {} if message["role"] == "tool" else message
            kept = {key: value for key, value in rest.items() if key != "tool_calls"}
            turns.append({**kept, "role": role, "content": content})

    def _call(self, entry: Mapping[str, Any]) -> str:
        arguments = entry["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(entry["function"]["name"], ensure_ascii=False)
        return f'<tool_call>{{"name": {name}, "arguments": {text}}}</tool_call>'


def describe_tool(tool: Mapping[str, object]) -> str:
    """Return a description such as `add(a: int, b: int = 0): Add two numbers`, and the lines below it."""
    name, parameters = _function(tool)
    description = str(_entry(tool).get("description") or "").strip().split("\n")[0]
    lines = [f"{name}({_fields(parameters)})" + (f": {description}" if description else "")]
    if not _is_plain(parameters):
        lines += _descriptions(parameters)
    for label, schema in cast("Mapping[str, Mapping[str, Any]]", parameters.get("$defs") or {}).items():
        lines.append(f"  {label}: {_type(schema)}")
        lines += _descriptions(schema, f"{label}.")
    return "\n".join(lines)


def _fields(schema: Mapping[str, Any]) -> str:
    """Return the properties of an object as text, such as `a: int, b: int = 0`."""
    required = set(cast("list[str]", schema.get("required") or []))
    fields: list[str] = []
    for key, inner in _properties(schema).items():
        default = ""
        if "default" in inner:
            default = " = " + json.dumps(inner["default"], ensure_ascii=False)
        elif key not in required:
            default = " = None"
        fields.append(f"{key}: {_type(inner)}{default}")
    return ", ".join(fields)


def _descriptions(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield a line for each described property, and for those of objects that the schema has inside."""
    for key, inner in _properties(schema).items():
        if text := " ".join(str(inner.get("description") or "").split()):
            yield f"  {path}{key}: {text}"
        for option in (inner, *(inner.get("anyOf") or ())):
            yield from _descriptions(option, f"{path}{key}.")
            items = option.get("items")
            if isinstance(items, dict):
                yield from _descriptions(cast("dict[str, Any]", items), f"{path}{key}[].")


def _is_plain(parameters: Mapping[str, Any]) -> bool:
    """Return whether there is at most one argument, and it has no fields of its own."""
    properties = list(_properties(parameters).values())
    return not properties or (len(properties) == 1 and properties[0].get("type") in {*_TYPES} - _NESTED)


def _entry(tool: Mapping[str, object]) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", tool.get("function") or tool)


def _function(tool: Mapping[str, object]) -> tuple[str, Mapping[str, Any]]:
    entry = _entry(tool)
    return str(entry["name"]), entry.get("parameters") or {}


def _properties(parameters: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return parameters.get("properties") or {}


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " | ".join(dict.fromkeys(_type(option) for option in options))
    kind = schema.get("type", "value")
    if isinstance(kind, list):
        return " | ".join(_TYPES.get(name, name) for name in cast("list[str]", kind))
    return _container(schema) or _TYPES.get(str(kind), str(kind)) + _constraints(schema)


def _container(schema: Mapping[str, Any]) -> str:
    """Return the type of a list or an object with what is in it; empty if that is not known."""
    items, values = schema.get("items"), schema.get("additionalProperties")
    if schema.get("type") == "array" and items and isinstance(items, dict):
        return f"list[{_type(cast('dict[str, Any]', items))}]"
    if schema.get("type") != "object":
        return ""
    if _properties(schema):
        return f"{{{_fields(schema)}}}"
    if values and isinstance(values, dict):
        return f"dict[str, {_type(cast('dict[str, Any]', values))}]"
    return ""


def _constraints(schema: Mapping[str, Any]) -> str:
    words = [text.format(schema[key]) for key, text in _CONSTRAINTS.items() if key in schema]
    return f" ({', '.join(words)})" if words else ""
