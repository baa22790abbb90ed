"""The shape of a tool-call grammar: which tags hold calls, and how their inside is read."""

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
"""Text, or tags with what is inside each; nothing at all is an empty tuple."""


@dataclass(frozen=True, slots=True)
class RawCall:
    """A call as its grammar reads it, before it is held against the tools."""

    name: str = ""
    arguments: str = "{}"
    """JSON text; for grammars without types it is made from `untyped`."""
    parsed: Mapping[str, Any] | None = None
    """The values of `arguments`, where they were read and a tool can be given them."""
    untyped: Mapping[str, Nested] | None = None
    """Arguments as untyped text; the tool's schema gives them their types."""
    is_text: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """For values whose call says it: text as it is (True) or JSON (False), whatever the schema says."""
    id: str = ""
    status: CallStatus = CallStatus.OK
    error: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the completion: `text[start:end]`."""

    start: int
    end: int


Reader: TypeAlias = Callable[[TurnText, Span], Sequence[RawCall]]
"""Reads the inside of one block. Never raises; what it cannot read becomes a call with a status."""


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of text that holds calls: from an opening tag to a closing one."""

    opens: str
    closes: str
    """Empty: the block ends with the next opening tag or with the turn."""
    read: Reader


@dataclass(frozen=True, slots=True)
class WholeTurn:
    """A turn as a grammar reads it that knows more than calls."""

    content: str
    thinking: str
    calls: tuple[RawCall, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """One way to write tool calls."""

    name: str
    blocks: tuple[Block, ...] = ()
    bare: Callable[[str], Sequence[RawCall] | None] | None = None
    """Reads a turn without tags; None from it means that the turn is text."""
    whole: Callable[..., WholeTurn] | None = None
    """Reads thinking and content too: called with the turn and `ended=`."""
    wrappers: tuple[str, ...] = ()
    """Tags around blocks that carry nothing themselves."""
    foreign: Foreign | None = None
    """Reads the turn with another package's parser; `blocks` then only tell unclosed calls."""


@dataclass(frozen=True, slots=True)
class ToolIndex:
    """The tools of an episode as the parser needs them."""

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Parameter schema by tool name."""
    entries: tuple[Mapping[str, object], ...] = ()
    """The tools as they were given."""

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, object]]) -> ToolIndex:
        """Index tool schemas in OpenAI's shape."""
        functions = [cast("Mapping[str, Any]", tool.get("function") or tool) for tool in tools]
        schemas = {str(entry["name"]): entry.get("parameters") or {} for entry in functions}
        return cls(schemas, tuple(tools))

    def typed(
        self, name: str, values: Mapping[str, Nested], is_text: Mapping[str, bool]
    ) -> tuple[str, dict[str, Any] | None]:
        """Give untyped arguments their types, by the call itself or by the tool's schema.

        Returns:
            Their JSON text, and the values if a tool can be given them.
        """
        properties = self.schemas.get(name, {}).get("properties") or {}
        typed = {
            key: value if is_text.get(key) else _typed(value, None if key in is_text else properties.get(key))
            for key, value in values.items()
        }
        return as_arguments(typed)


def as_arguments(values: _Value) -> tuple[str, _Value | None]:
    """Return values as JSON text, and once more if a tool can be given them: JSON has no NaN, for example."""
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        check_text(text, values)
    except ValueError:
        return json.dumps(values, ensure_ascii=False), None
    return text, values


Foreign: TypeAlias = Callable[[TurnText, str, ToolIndex], WholeTurn]
"""A parser of another package: gets the turn, its text outside of thinking, and the tools."""

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
    """Return a list or an object that was written as Python writes it, a word of Python, or the text."""
    stripped = text.strip()
    if stripped.startswith(("{", "[")):
        try:
            value, end = LiteralReader(stripped).value(0)
        except (ValueError, RecursionError):
            return text
        return value if end == len(stripped) else text
    return _PYTHON_WORDS.get(stripped, text)


def _structure(tags: tuple[tuple[str, Nested], ...], schema: Mapping[str, Any]) -> object:
    """Return tags as a list or an object: as the schema says, else a row of `item` is a list."""
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
    found: set[str] = set()
    for option in options:
        kind = option.get("type")
        found.update(kind if isinstance(kind, list) else [kind] if isinstance(kind, str) else [])
    return found
