"""Describe, call and answer tools in plain text, for templates that have no place for tools.

The system message says how to call a tool and lists the tools, one line each; a call is
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in the model's text; results come back in
a user turn as `<tool_response>...</tool_response>`. The text is short, because small models must be
able to follow it, and depends on the tools alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

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


@dataclass(frozen=True, slots=True)
class TextProtocol:
    """How tools are described to a model in plain text; pass a changed one to a renderer as `protocol`."""

    describe: Callable[[Sequence[Mapping[str, object]]], str] | None = None
    """Function that makes the system text from the tool schemas; the built-in text if None."""
    response_open: str = "<tool_response>\n"
    response_close: str = "\n</tool_response>"

    def system_text(self, tools: Sequence[Mapping[str, object]]) -> str:
        """Return the text of the system message that describes the tools."""
        if self.describe is not None:
            return self.describe(tools)
        if not tools:
            return ""
        name, parameters = _function(tools[0])
        example = ", ".join(f'"{key}": ...' for key in _properties(parameters))
        call = f'<tool_call>{{"name": "{name}", "arguments": {{{example}}}}}</tool_call>'
        return "\n".join([f"To call a tool, write {call}", "Tools:", *map(describe_tool, tools)])

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

    def _add(self, turns: list[Plain], message: Plain) -> None:
        role = message["role"]
        content = str(message.get("content") or "")
        if role == "tool":
            content = f"{self.response_open}{content}{self.response_close}"
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
    """Return a description of one line, such as `add(a: int, b: int = 0): Add two numbers`."""
    name, parameters = _function(tool)
    required = set(cast("list[str]", parameters.get("required") or []))
    arguments: list[str] = []
    for key, schema in _properties(parameters).items():
        default = ""
        if "default" in schema:
            default = " = " + json.dumps(schema["default"], ensure_ascii=False)
        elif key not in required:
            default = " = None"
        arguments.append(f"{key}: {_type(schema)}{default}")
    description = str(_entry(tool).get("description") or "").strip().split("\n")[0]
    return f"{name}({', '.join(arguments)})" + (f": {description}" if description else "")


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
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " | ".join(dict.fromkeys(_type(option) for option in options))
    kind = schema.get("type", "object" if "$ref" in schema else "value")
    if isinstance(kind, list):
        return " | ".join(_TYPES.get(name, name) for name in cast("list[str]", kind))
    if kind == "array" and isinstance(schema.get("items"), dict) and "type" in schema["items"]:
        return f"list[{_type(schema['items'])}]"
    return _TYPES.get(kind, kind)
