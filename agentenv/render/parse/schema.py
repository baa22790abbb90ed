"""What a JSON schema allows a value to be, with references and combinations resolved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
    def of(cls, schema: Mapping[str, Any]) -> Alternatives:
        """Return the alternatives of the schema of a tool's parameters."""
        return cls(tuple(_parts(schema, schema)), schema)

    @property
    def values(self) -> Sequence[object]:
        """The values of `enum` and `const`."""
        constants = [part["const"] for part in self.parts if "const" in part]
        return [*constants, *(value for part in self.parts for value in part.get("enum") or ())]

    @property
    def types(self) -> set[str]:
        """The names of the types that are allowed; those of its values where a schema names none."""
        types: set[str] = set()
        for part in self.parts:
            kind = part.get("type")
            types.update(cast("list[str]", kind) if isinstance(kind, list) else [kind] if kind else [])
        return types or {_KINDS[type(value)] for value in self.values}

    @property
    def takes_text(self) -> bool:
        """Whether a text is allowed, and not only texts that are written like something else."""
        if self.values:
            return any(isinstance(value, str) for value in self.values)
        return "string" in self.types

    def item(self, index: int) -> Alternatives | None:
        """Return the schema of an item of a list; None if there is none."""
        rows = (part.get("prefixItems") or () for part in self.parts)
        fixed = (row[index] for row in rows if index < len(row))
        return self._first(chain(fixed, (part.get("items") for part in self.parts)))

    def property(self, key: str) -> Alternatives | None:
        """Return the schema of a property; None if there is none."""
        named = (part["properties"].get(key) for part in self.parts if part.get("properties"))
        return self._first(chain(named, (part.get("additionalProperties") for part in self.parts)))

    def _first(self, schemas: Iterable[object]) -> Alternatives | None:
        return next((self._below(each) for each in schemas if isinstance(each, Mapping)), None)

    def _below(self, schema: object) -> Alternatives:
        return Alternatives(tuple(_parts(schema, self.root)), self.root)


NO_SCHEMA = Alternatives((), {})


def _parts(schema: object, root: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and every schema that it refers to or combines; an unknown reference has none."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    schema = cast("Mapping[str, Any]", schema)
    yield schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        target: Any = root
        for step in reference.removeprefix("#").split("/")[1:]:
            target = (
                target.get(step.replace("~1", "/").replace("~0", "~"))
                if isinstance(target, Mapping)
                else None
            )
        yield from _parts(target, root, depth + 1)
    for word in ("allOf", "anyOf", "oneOf"):
        for option in schema.get(word) or ():
            yield from _parts(option, root, depth + 1)
