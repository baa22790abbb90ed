"""Draw random tool calls from a tool's schema, with valid and invalid arguments."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["random_arguments", "random_call"]

_TEXTS = (
    "",
    "a",
    "naïve\n",
    "0",
    "-1",
    "x" * 500,
    '"; DROP TABLE t; --',
    "../../etc/passwd",
    "\x00",
    "漢字",
    "{}",
)
_WHOLE = (0, 1, -1, 2, 7, 10**6, -(10**12), 2**63)
_REAL = (0.0, -0.5, 1e-9, 3.25, 1e300)
_BROKEN = ("", "{", "[]", "null", '{"a": }', "not json", '{"a": NaN}', '{"a": 1, "a": 2}', '"text"')


def random_call(
    schemas: Sequence[Mapping[str, Any]], rng: random.Random, number: int, words: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a random tool call as a model might write it; about one in three is invalid."""
    schema = rng.choice(schemas)["function"]
    arguments = random_arguments(schema["parameters"], rng, words)
    text = json.dumps(arguments)
    if rng.random() < 0.35:
        text = _spoil(arguments, rng)
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": schema["name"], "arguments": text},
    }


def random_arguments(
    schema: Mapping[str, Any], rng: random.Random, words: Sequence[str] = ()
) -> dict[str, Any]:
    """Return random arguments that a JSON Schema of an object allows.

    Args:
        schema: JSON Schema of the object.
        rng: random generator.
        words: words that the environment has shown. Half of the texts are drawn from them, so that some
            calls pass the tool's first check of a name.
    """
    value = _Draw(rng, schema.get("$defs", {}), words).value(schema, depth=0)
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class _Draw:
    """Draws random values for the parts of one schema."""

    rng: random.Random
    defs: Mapping[str, Any]
    words: Sequence[str]

    def value(self, schema: Mapping[str, Any], depth: int) -> Any:
        """Return a random value that a schema allows."""
        rng = self.rng
        if "$ref" in schema:
            return self.value(self.defs.get(schema["$ref"].rpartition("/")[2], {}), depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        for choices in ("anyOf", "oneOf"):
            if choices in schema:
                options = schema[choices]
                # At depth 5 the last choice is taken, which is null for optional values: this ends recursion.
                return self.value(options[-1] if depth > 4 else rng.choice(options), depth + 1)
        kind = schema.get("type", "string")
        if isinstance(kind, list):
            kind = rng.choice(kind)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            few = int(schema.get("minItems", 0))
            size = few if depth > 4 else rng.randint(few, min(few + 3, int(schema.get("maxItems", few + 3))))
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(size)]
        return self._scalar(kind, schema)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = set(schema.get("required", ()))
        return {
            name: self.value(part, depth + 1)
            for name, part in schema.get("properties", {}).items()
            if name in required or self.rng.random() < 0.5
        }

    def _scalar(self, kind: str, schema: Mapping[str, Any]) -> Any:
        rng = self.rng
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "null":
            return None
        if kind in {"integer", "number"}:
            drawn = rng.choice(_WHOLE if kind == "integer" else (*_WHOLE, *_REAL))
            low = schema.get("minimum", schema.get("exclusiveMinimum"))
            high = schema.get("maximum", schema.get("exclusiveMaximum"))
            drawn = drawn if low is None else max(drawn, low)
            return drawn if high is None else min(drawn, high)
        drawn = rng.choice(self.words if self.words and rng.random() < 0.5 else _TEXTS)
        return drawn[: schema.get("maxLength", len(drawn))].ljust(schema.get("minLength", 0), "z")


def _spoil(arguments: dict[str, Any], rng: random.Random) -> str:
    """Return the arguments as JSON text with one mistake."""
    way = rng.randrange(5)
    spoiled = dict(arguments)
    if way == 0 or not spoiled:
        return rng.choice(_BROKEN)
    name = rng.choice(list(spoiled))
    if way == 1:
        del spoiled[name]
    elif way == 2:
        spoiled[name] = rng.choice([None, [], {}, "wrong", 1.5, True])
    elif way == 3:
        spoiled["unknown_argument"] = 1
    else:
        return json.dumps(arguments)[: -rng.randint(1, 3)]
    return json.dumps(spoiled)
