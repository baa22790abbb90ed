"""Tools that Anthropic's models know by their type alone and that the client runs.

Their models were trained on these tools, so clients send no schema. Another model must be shown one. Tools
that Anthropic's own servers run, such as its web search, are not here, because nobody would run them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ClientTool", "client_tool"]


@dataclass(frozen=True, slots=True)
class ClientTool:
    """What a model must know of a tool."""

    description: str
    parameters: dict[str, Any]


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


_LINES = {"type": "array", "items": {"type": "integer"}, "description": "first and last line, from 1"}
_LINE = {"type": "integer", "description": "line after which the text is inserted; 0 is the beginning"}
_BASH = ClientTool(
    "Run a command in a bash session that is kept from call to call.",
    _object(
        [],
        command=_text("the command; required unless restart is true"),
        restart={"type": "boolean", "description": "true begins a new session"},
    ),
)
_EDITOR = ClientTool(
    "View, create and edit text files.",
    _object(
        ["command", "path"],
        command=_one_of("view", "create", "str_replace", "insert"),
        path=_text("path of the file or directory"),
        file_text=_text("content of the new file, for create"),
        old_str=_text("the text to replace, which must occur once, for str_replace"),
        new_str=_text("the text in its place, for str_replace"),
        insert_line=_LINE,
        insert_text=_text("the text to insert, for insert"),
        view_range=_LINES,
    ),
)
_MEMORY = ClientTool(
    "Keep notes in files below /memories.",
    _object(
        ["command"],
        command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
        path=_text("path below /memories"),
        file_text=_text("content of the new file, for create"),
        old_str=_text("the text to replace, for str_replace"),
        new_str=_text("the text in its place, for str_replace"),
        insert_line=_LINE,
        insert_text=_text("the text to insert, for insert"),
        old_path=_text("path before, for rename"),
        new_path=_text("path after, for rename"),
        view_range=_LINES,
    ),
)
_TOOLS = {"bash": _BASH, "text_editor": _EDITOR, "memory": _MEMORY}


def client_tool(kind: str) -> ClientTool | None:
    """Return the tool of a type such as `bash_20250124`; None if the client does not run it."""
    name, _, date = kind.rpartition("_")
    return _TOOLS.get(name) if date.isdecimal() else None
