"""Draw values that a JSON Schema allows, for policies without a model and for random tool calls.

`Draw` follows the structure of a schema and keeps its bounds, patterns and formats. Subclasses choose the
texts and numbers.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Mapping, Sequence
from importlib import import_module
from random import Random
from typing import Any

__all__ = ["Draw"]

DEEPEST = 6
"""Depth of a value below which lists are as short as possible and optional fields are left out."""
MOST_VALUES = 5_000
"""Number of values in a draw after which each further one is null: this ends schemas of endless values."""
FORMATS = {
    "date": "2026-0{a}-1{b}",
    "date-time": "2026-0{a}-1{b}T0{b}:30:00Z",
    "time": "0{b}:3{a}:00Z",
    "duration": "PT{a}H{b}M",
    "email": "user{b}@example.com",
    "uuid": "1234567{b}-1234-4234-8234-12345678901{a}",
    "uri": "https://example.com/{b}",
    "hostname": "host{b}.example.com",
    "ipv4": "192.0.2.{b}",
    "ipv6": "2001:db8::{b}",
    "ipv4network": "192.0.2.0/24",
    "ipv6network": "2001:db8::/32",
    "json-string": "{b}",
}
"""A valid text for each format; {a} stands for a digit from 1 to 9, {b} for one from 0 to 9."""
_CATEGORIES = {
    "CATEGORY_DIGIT": string.digits,
    "CATEGORY_WORD": string.ascii_lowercase,
    "CATEGORY_SPACE": " ",
    "CATEGORY_NOT_DIGIT": string.ascii_lowercase,
    "CATEGORY_NOT_SPACE": string.ascii_lowercase,
    "CATEGORY_NOT_WORD": " -",
}


class Draw:
    """Draws one value that a schema allows.

    Args:
        random: the random generator.
        root: the whole schema, in which `$ref` is looked up.
        optional: probability of an optional field.
    """

    def __init__(self, random: Random, root: Mapping[str, Any], *, optional: float = 0.3) -> None:
        self.random = random
        self._root = root
        self._optional = optional
        self._num_values = 0

    def value(self, schema: Any, depth: int = 0) -> Any:
        """Return a value that the schema allows; rare kinds of schema may be missed.

        A schema that contains itself ends at a depth limit: in an empty list, or in null if allowed.
        """
        self._num_values += 1
        if not isinstance(schema, Mapping) or depth > 3 * DEEPEST or self._num_values > MOST_VALUES:
            return None
        node = self._resolved(schema)
        if "const" in node:
            return node["const"]
        if node.get("enum"):
            return self.random.choice(node["enum"])
        for key in ("anyOf", "oneOf"):
            if options := node.get(key):
                # Below the depth limit the choice is null where null is allowed: this ends recursion.
                null = [option for option in options if option.get("type") == "null"]
                chosen = null[0] if depth > DEEPEST and null else self.random.choice(options)
                return self.value(chosen, depth + 1)
        kind = node.get("type")
        if isinstance(kind, list):
            kind = "null" if depth > DEEPEST and "null" in kind else self.random.choice(kind or ["null"])
        return self._of_kind(kind, node, depth)

    def text(self, schema: Mapping[str, Any]) -> str:
        """Return a text; its length is corrected afterwards."""
        return "text"

    def number(self, low: float, high: float, *, whole: bool) -> float:
        """Return a number between `low` and `high`, which may be infinite."""
        least = max(low, min(high, 0) - 9) if low == -math.inf else low
        most = min(high, least + 9)
        return self.random.randint(int(least), int(most)) if whole else (least + most) / 2

    def anything(self, schema: Mapping[str, Any]) -> Any:
        """Return a value for a schema without a type."""
        return self.text(schema)

    def _resolved(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the definition to which a `$ref` points, or the node itself, merged with its `allOf`."""
        reference = node.get("$ref")
        if isinstance(reference, str):
            target: Any = self._root
            for step in reference.removeprefix("#/").split("/"):
                target = target.get(step, {}) if isinstance(target, Mapping) else {}
            node = target if isinstance(target, Mapping) else {}
        for part in node.get("allOf", ()):
            node = {**node, **self._resolved(part)}
        return node

    def _of_kind(self, kind: Any, node: Mapping[str, Any], depth: int) -> Any:
        if kind == "object":
            return self._object(node, depth)
        if kind == "array":
            return self._array(node, depth)
        if kind == "boolean":
            return self.random.random() < 0.5
        if kind == "null":
            return None
        if kind in {"integer", "number"}:
            return self._bounded(node, whole=kind == "integer")
        return self.anything(node) if kind is None else self._text(node)

    def _object(self, node: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = set(node.get("required") or ())
        fields = {
            name: self.value(part, depth + 1)
            for name, part in (node.get("properties") or {}).items()
            if name in required or (depth <= DEEPEST and self.random.random() < self._optional)
        }
        extra = node.get("additionalProperties")
        wanted = max(0, int(node.get("minProperties", 0)) - len(fields))
        if isinstance(extra, Mapping) and not node.get("properties"):
            wanted = wanted if depth > DEEPEST else max(wanted, self.random.randint(0, 2))
            names = (f"key{index}" for index in range(wanted))
            fields |= {name: self.value(extra, depth + 1) for name in names}
        return fields

    def _array(self, node: Mapping[str, Any], depth: int) -> list[Any]:
        fixed: Sequence[Any] = node.get("prefixItems") or ()
        least = max(int(node.get("minItems", 0)), len(fixed))
        most = least if depth > DEEPEST else min(max(least, 2), int(node.get("maxItems", max(least, 2))))
        size = self.random.randint(min(max(least, 1), most), most)
        values = [self.value(part, depth + 1) for part in fixed]
        for _ in range(8 * size):
            if len(values) >= size:
                break
            drawn = self.value(node.get("items", {}), depth + 1)
            if not node.get("uniqueItems") or drawn not in values:
                values.append(drawn)
        return values

    def _bounded(self, node: Mapping[str, Any], *, whole: bool) -> float:
        least = 1 if whole else 1e-6
        low, high = node.get("minimum", -math.inf), node.get("maximum", math.inf)
        if (above := node.get("exclusiveMinimum")) is not None:
            low = max(low, above + least)
        if (below := node.get("exclusiveMaximum")) is not None:
            high = min(high, below - least)
        if whole:
            low = low if math.isinf(low) else math.ceil(low)
            high = high if math.isinf(high) else math.floor(high)
        drawn = min(max(self.number(low, high, whole=whole), low), high)
        if step := node.get("multipleOf"):
            lowest = math.ceil(low / step) * step if not math.isinf(low) else -math.inf
            drawn = max(math.floor(drawn / step) * step, lowest)
        return drawn

    def _text(self, node: Mapping[str, Any]) -> str:
        least, most = int(node.get("minLength", 0)), int(node.get("maxLength", 10**6))
        if (pattern := node.get("pattern")) and (drawn := _matching(pattern, least, most, self.random)):
            return drawn
        template = FORMATS.get(node.get("format", ""))
        if template is not None:
            return template.format(a=self.random.randint(1, 9), b=self.random.randint(0, 9))
        return self.text(node)[:most].ljust(least, "z")


def _matching(pattern: str, least: int, most: int, random: Random) -> str:
    """Return a text of allowed length that a regular expression matches; empty if none could be drawn."""
    parser: Any = import_module("re._parser")
    try:
        parts = parser.parse(pattern)
        for _ in range(32):
            drawn = _of_parts(parts, least, random)
            if least <= len(drawn) <= most and re.search(pattern, drawn):
                return drawn
    except (re.error, NotImplementedError):
        return ""
    return ""


def _of_parts(parts: Any, wanted: int, random: Random) -> str:
    return "".join(_of_part(str(kind), value, wanted, random) for kind, value in parts)


def _of_part(kind: str, value: Any, wanted: int, random: Random) -> str:
    if kind == "LITERAL":
        return chr(value)
    if kind == "ANY":
        return random.choice(string.ascii_lowercase)
    if kind == "IN":
        return random.choice(_members(value) or "z")
    if kind in {"MAX_REPEAT", "MIN_REPEAT"}:
        least, most, inner = value
        count = random.randint(least, min(int(most), max(least, wanted, 3)))
        return "".join(_of_parts(inner, wanted, random) for _ in range(count))
    if kind == "SUBPATTERN":
        return _of_parts(value[-1], wanted, random)
    if kind == "BRANCH":
        return _of_parts(random.choice(value[1]), wanted, random)
    if kind in {"AT", "ASSERT", "ASSERT_NOT"}:
        return ""
    raise NotImplementedError(kind)


def _members(value: Any) -> str:
    """Return characters of a set such as [a-z0-9_]."""
    kinds = [(str(kind), part) for kind, part in value]
    found = ""
    for kind, part in kinds:
        if kind == "LITERAL":
            found += chr(part)
        elif kind == "RANGE":
            found += "".join(map(chr, range(part[0], min(part[1], part[0] + 64) + 1)))
        elif kind == "CATEGORY":
            found += _CATEGORIES.get(str(part), "")
    if kinds and kinds[0][0] == "NEGATE":
        return "".join(sorted(set(string.ascii_lowercase + string.digits) - set(found)))
    return found
