"""The shape of a tool-call grammar: which tags hold calls, and how their inside is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from agentenv.messages import CallStatus
from agentenv.render.parse.scan import TurnText

__all__ = ["Block", "Grammar", "RawCall", "Reader", "ToolIndex"]


@dataclass(frozen=True, slots=True)
class RawCall:
    """A call as its grammar reads it, before it is held against the tools."""

    name: str = ""
    arguments: str = "{}"
    """JSON text; for grammars without types it is made from `values`."""
    values: Mapping[str, str] | None = None
    """Arguments as untyped text; the tool's schema gives them their types."""
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
    wrappers: tuple[str, ...] = ()
    """Tags around blocks that carry nothing themselves."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """One way to write tool calls."""

    name: str
    blocks: tuple[Block, ...] = ()
    bare: Callable[[str], Sequence[RawCall] | None] | None = None
    """Reads a whole turn without tags; None from it means that the turn is text."""


@dataclass(frozen=True, slots=True)
class ToolIndex:
    """The tools of an episode as the parser needs them."""

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Parameter schema by tool name."""

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, object]]) -> ToolIndex:
        """Index tool schemas in OpenAI's shape."""
        entries = [cast("Mapping[str, Any]", tool.get("function") or tool) for tool in tools]
        return cls({str(entry["name"]): entry.get("parameters") or {} for entry in entries})

    def typed(self, name: str, values: Mapping[str, str]) -> str:
        """Return untyped arguments as JSON text, typed by the tool's schema."""
        properties = self.schemas.get(name, {}).get("properties") or {}
        return json.dumps(
            {key: _typed(value, properties.get(key)) for key, value in values.items()}, ensure_ascii=False
        )


_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def _typed(text: str, schema: Mapping[str, Any] | None) -> object:
    if schema is not None and _takes_text(schema):
        if text.strip() in {"null", "None"} and "null" in _types(schema):
            return None
        return text
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _PYTHON_WORDS.get(text.strip(), text)


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
