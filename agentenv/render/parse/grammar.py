"""The parts of a tool-call grammar: which tags enclose calls, and which functions read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, cast

from agentenv.core.arguments import check_text
from agentenv.core.messages import CallStatus
from agentenv.render.parse.scan import TurnText
from agentenv.render.parse.values import LiteralReader

__all__ = [
    "Block",
    "Foreign",
    "Grammar",
    "Nested",
    "RawCall",
    "Reader",
    "Span",
    "ToolIndex",
    "WholeTurn",
    "as_arguments",
]


_Value = TypeVar("_Value")

Nested: TypeAlias = "str | tuple[tuple[str, Nested], ...]"
"""Text, or a tuple of tags with their contents; the tuple is empty if there is neither."""


@dataclass(frozen=True, slots=True)
class RawCall:
    """A call as its grammar reads it, before it is checked against the tools."""

    name: str = ""
    arguments: str = "{}"
    """JSON text of the arguments; a grammar without types leaves it out and sets `untyped`."""
    parsed: Mapping[str, Any] | None = None
    """The decoded `arguments`; None if they were not decoded or cannot be passed to a tool."""
    untyped: Mapping[str, Nested] | None = None
    """Arguments as untyped text, which is converted to the types in the schema of the tool."""
    is_text: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Kinds that the call itself states, which override the schema: text (True) or JSON (False)."""
    id: str = ""
    status: CallStatus = CallStatus.OK
    error: str = ""
    text: str | None = None
    """The call as it was written; None if the grammar does not say, empty if the content has it already."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the completion: `text[start:end]`."""

    start: int
    end: int


Reader: TypeAlias = Callable[[TurnText, Span], Sequence[RawCall]]
"""Function that reads the inside of one block; it never raises but returns malformed calls with a status."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the text that contains calls, from an opening tag to a closing tag."""

    opens: str
    closes: str
    """The closing tag; if empty, the block ends at the next opening tag or at the end of the turn."""
    read: Reader


@dataclass(frozen=True, slots=True)
class WholeTurn:
    """A whole turn as read by a grammar that covers content and thinking as well as calls."""

    content: str
    thinking: str
    calls: tuple[RawCall, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A format in which models write tool calls."""

    name: str
    blocks: tuple[Block, ...] = ()
    bare: Callable[[str], Sequence[RawCall] | None] | None = None
    """Function that reads calls without tags from a turn; it returns None if the turn is plain text."""
    whole: Callable[..., WholeTurn] | None = None
    """Function that reads thinking and content too; it is called with the turn and `ended=`."""
    wrappers: tuple[str, ...] = ()
    """Tags around blocks, which are removed from the content."""
    foreign: Foreign | None = None
    """The parser of another package; `blocks` then serve only to detect calls that were not closed."""


@dataclass(frozen=True, slots=True)
class ToolIndex:
    """The tools of an episode, indexed for the parser."""

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Schema of the parameters, by name of the tool."""
    entries: tuple[Mapping[str, object], ...] = ()
    """The tool schemas as they were passed in."""

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, object]]) -> ToolIndex:
        """Index tool schemas in OpenAI's shape."""
        functions = [cast("Mapping[str, Any]", tool.get("function") or tool) for tool in tools]
        schemas = {str(entry["name"]): entry.get("parameters") or {} for entry in functions}
        return cls(schemas, tuple(tools))

    def typed(
        self, name: str, values: Mapping[str, Nested], is_text: Mapping[str, bool]
    ) -> tuple[str, dict[str, Any] | None]:
        """Convert untyped arguments to the types that the call or the schema of the tool states.

        Returns:
            The JSON text of the arguments, and their values, or None if they cannot be passed to a tool.
        """
        properties = self.schemas.get(name, {}).get("properties") or {}
        typed = {
            key: value if is_text.get(key) else _typed(value, None if key in is_text else properties.get(key))
            for key, value in values.items()
        }
        return as_arguments(typed)


def as_arguments(values: _Value) -> tuple[str, _Value | None]:
    """Return values as JSON text, and the values, or None if they cannot be passed to a tool, such as NaN."""
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        check_text(text, values)
    except ValueError:
        return json.dumps(values, ensure_ascii=False), None
    return text, values


Foreign: TypeAlias = Callable[[TurnText, str, ToolIndex], WholeTurn]
"""Parser of another package, called with the turn, its text outside of thinking, and the tools."""

_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def _typed(text: Nested, schema: Mapping[str, Any] | None) -> object:
    if isinstance(text, tuple):
        return _structure(text, schema or {})
    if schema is not None and _takes_text(schema):
        return None if text.strip() in {"null", "None"} and "null" in _types(schema) else text
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _python_value(text)


def _python_value(text: str) -> object:
    """Return the list, object or constant that was written in Python's spelling, else the text itself."""
    stripped = text.strip()
    if stripped.startswith(("{", "[")):
        try:
            value, end = LiteralReader(stripped).value(0)
        except (ValueError, RecursionError):
            return text
        return value if end == len(stripped) else text
    return _PYTHON_WORDS.get(stripped, text)


def _structure(tags: tuple[tuple[str, Nested], ...], schema: Mapping[str, Any]) -> object:
    """Return tags as a list or an object, as the schema says; without a schema, `item` tags form a list."""
    options = [schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    types = _types(schema)
    row = "array" in types if types & {"array", "object"} else all(tag == "item" for tag, _ in tags)
    if not tags and not types & {"array", "object"}:
        return ""
    if row:
        items = next((option["items"] for option in options if "items" in option), None)
        return [_typed(inside, items) for _, inside in tags]
    properties = next((option["properties"] for option in options if "properties" in option), {})
    return {tag: _typed(inside, properties.get(tag)) for tag, inside in tags}


def _refuse_constant(name: str) -> object:
    raise ValueError(name)


def _takes_text(schema: Mapping[str, Any]) -> bool:
    if "enum" in schema:
        return all(isinstance(value, str) for value in schema["enum"])
    return "string" in _types(schema)


def _types(schema: Mapping[str, Any]) -> set[str]:
    options = [schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    types: set[str] = set()
    for option in options:
        kind = option.get("type")
        types.update(kind if isinstance(kind, list) else [kind] if isinstance(kind, str) else [])
    return types
