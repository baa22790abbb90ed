"""What a JSON schema allows a value to be, with references and combinations resolved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

__all__ = ["NO_SCHEMA", "Alternatives"]

_MAX_DEPTH = 16
"""References and combinations inside each other that are followed; more are no schema of a tool."""
_KINDS: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class Alternatives:
    """A schema as the flat list of the schemas that it refers to and combines."""

    parts: tuple[Mapping[str, Any], ...]
    root: Mapping[str, Any]

    @classmethod
    def of(cls, schema: Mapping[str, Any], texts: Mapping[str, object]) -> Alternatives:
        """Return the alternatives of the schema of a tool's parameters.

        Args:
            schema: the schema.
            texts: the values as they were written; an alternative with other constants is none.
        """
        return cls(tuple(_Walk(schema, texts).parts(schema)), schema)

    @property
    def values(self) -> Sequence[object]:
        """The values of `enum` and `const`."""
        return [value for part in self.parts for value in _values(part)]

    @property
    def names(self) -> set[str]:
        """The names of the properties."""
        return {key for part in self.parts for key in part.get("properties") or ()}

    @property
    def types(self) -> set[str]:
        """The names of the types that are allowed; those of its values where a schema names none."""
        types: set[str] = set()
        for part in self.parts:
            kind = part.get("type") or [_KINDS[type(value)] for value in _values(part)]
            types.update(cast("list[str]", kind) if isinstance(kind, list) else [kind])
        return types

    def takes(self, value: object) -> bool:
        """Return whether a value has one of the allowed types."""
        kind = _KINDS[type(value)]
        return kind in self.types or (kind == "integer" and "number" in self.types)

    def item(self, index: int) -> Alternatives:
        """Return the schema of an item of a list."""
        rows = (part.get("prefixItems") or () for part in self.parts)
        fixed = [row[index] for row in rows if index < len(row)]
        return self._below(fixed or [part.get("items") for part in self.parts])

    def property(self, key: str) -> Alternatives:
        """Return the schema of a property."""
        named = [part["properties"][key] for part in self.parts if key in (part.get("properties") or ())]
        return self._below(named or [part.get("additionalProperties") for part in self.parts])

    def _below(self, schemas: Sequence[object]) -> Alternatives:
        walk = _Walk(self.root, {})
        return Alternatives(tuple(part for each in schemas for part in walk.parts(each)), self.root)


NO_SCHEMA = Alternatives((), {})


def _values(part: Mapping[str, Any]) -> Sequence[object]:
    return [part["const"]] if "const" in part else part.get("enum") or ()


class _Walk:
    """A walk over a schema and every schema that it refers to or combines, each once."""

    def __init__(self, root: Mapping[str, Any], texts: Mapping[str, object]) -> None:
        self._root = root
        self._texts = texts
        self._seen: set[int] = set()

    def parts(self, schema: object, depth: int = 0) -> Iterator[Mapping[str, Any]]:
        """Yield the schemas; an unknown reference has none."""
        if not isinstance(schema, Mapping) or id(schema) in self._seen or depth > _MAX_DEPTH:
            return
        self._seen.add(id(schema))
        schema = cast("Mapping[str, Any]", schema)
        yield schema
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            yield from self.parts(_target(reference, self._root), depth + 1)
        for word in ("allOf", "anyOf", "oneOf"):
            for option in schema.get(word) or ():
                parts = tuple(self.parts(option, depth + 1))
                if word == "allOf" or _fits(Alternatives(parts, self._root), self._texts):
                    yield from parts


def _target(reference: str, root: Mapping[str, Any]) -> object:
    target: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target


def _fits(option: Alternatives, texts: Mapping[str, object]) -> bool:
    """Return whether each text may be one of the constants that an alternative has for it, if it has any."""
    for key, text in texts.items():
        values = option.property(key).values
        if values and not any(text in (value, json.dumps(value)) for value in values):
            return False
    return True
