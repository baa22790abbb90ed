"""Dialects of a tool's JSON Schema, and the order of keys that makes its bytes stable.

`openai` is plain JSON Schema with `$defs`; `inline` has every `$ref` replaced by what it names, for
chat templates that print schemas raw; `strict` keeps the rules of OpenAI's strict mode: every
property required, no further properties, optional arguments as nullable ones.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from agentenv.core.errors import ToolDefinitionError

__all__ = ["STRICT_MAX_DEPTH", "Dialect", "Schema", "in_dialect", "schema_depth", "tidy"]

Dialect: TypeAlias = Literal["openai", "strict", "inline"]
Schema: TypeAlias = dict[str, Any]

STRICT_MAX_DEPTH = 10
"""Levels of nesting that OpenAI's strict mode takes."""

_FIRST = ("$ref", "type", "description", "enum", "const", "default", "anyOf", "oneOf", "items", "prefixItems")
_OBJECT = ("properties", "required", "additionalProperties")
_ONE = ("items", "additionalProperties", "not", "contains", "propertyNames")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "$defs", "patternProperties")
_JSON_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
_STRICT_KEYS = {
    *("$ref", "$defs", "type", "description", "enum", "const", "anyOf", "items", "properties", "required"),
    *("additionalProperties", "pattern", "format", "multipleOf", "minimum", "maximum", "exclusiveMinimum"),
    *("exclusiveMaximum", "minItems", "maxItems"),
}
_STRICT_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}


def in_dialect(parameters: Mapping[str, Any], dialect: Dialect, tool: str) -> Schema:
    """Return a schema of arguments in a dialect; the one given is left as it is.

    Raises:
        ToolDefinitionError: The strict dialect cannot express a parameter; the message names it.
    """
    schema = copy.deepcopy(dict(parameters))
    if dialect == "openai":
        return schema
    if dialect == "inline":
        return _ordered(_inline(schema, schema.pop("$defs", {}), ()))
    if dialect != "strict":
        raise ToolDefinitionError(
            f"unknown schema dialect {dialect!r}", remedy="use 'openai', 'strict' or 'inline'"
        )
    if schema_depth(schema) > STRICT_MAX_DEPTH:
        raise ToolDefinitionError(
            f"tool {tool}: its arguments nest {schema_depth(schema)} levels deep, strict mode takes "
            f"{STRICT_MAX_DEPTH}",
            remedy="flatten them, or use the dialect 'openai'",
        )
    return _Strict(schema, tool).result()


def tidy(schema: Schema) -> Schema:
    """Drop titles, put simple definitions in place, name the types of enums, order the keys."""
    definitions = schema.get("$defs", {})
    simple = {name: entry for name, entry in definitions.items() if "enum" in entry or "const" in entry}

    def visit(node: Schema) -> Schema:
        node.pop("title", None)
        target = _name_of(node.get("$ref"))
        if target in simple:
            del node["$ref"]
            node = {**copy.deepcopy(simple[target]), **node}
            node.pop("title", None)
        if "enum" in node and "type" not in node and "anyOf" not in node:
            types = list(dict.fromkeys(_JSON_TYPES[type(value)] for value in node["enum"]))
            node["type"] = types[0] if len(types) == 1 else types
        return node

    result = _walk(schema, visit)
    for name in simple:
        del result["$defs"][name]
    if not result.get("$defs", True):
        del result["$defs"]
    return _ordered(result)


def schema_depth(schema: Mapping[str, Any]) -> int:
    """Return how many levels of objects and arrays a schema nests; a recursive type counts once."""
    definitions = schema.get("$defs", {})

    def depth(node: Any, open_names: tuple[str, ...]) -> int:
        if not isinstance(node, Mapping):
            return 0
        target = _name_of(node.get("$ref"))
        if target:
            return 0 if target in open_names else depth(definitions.get(target), (*open_names, target))
        below = [depth(node.get(key), open_names) for key in _ONE]
        for key in _MANY:
            below += [depth(entry, open_names) for entry in node.get(key, ())]
        below += [depth(entry, open_names) for entry in node.get("properties", {}).values()]
        own = 1 if node.get("type") in ("object", "array") else 0
        return own + max(below, default=0)

    return depth(schema, ())


def _walk(node: Any, visit: Callable[[Schema], Schema]) -> Any:
    """Apply `visit` to every schema, the outer one first."""
    if not isinstance(node, dict):
        return node
    node = visit(node)
    for key in _ONE:
        if isinstance(node.get(key), dict):
            node[key] = _walk(node[key], visit)
    for key in _MANY:
        if key in node:
            node[key] = [_walk(entry, visit) for entry in node[key]]
    for key in _NAMED:
        if key in node:
            node[key] = {name: _walk(entry, visit) for name, entry in node[key].items()}
    return node


def _ordered(schema: Schema) -> Schema:
    """Put the keys of every schema into one order, so that equal schemas have equal bytes."""

    def rank(key: str) -> tuple[int, int, str]:
        if key in _FIRST:
            return 0, _FIRST.index(key), key
        if key in _OBJECT:
            return 2, _OBJECT.index(key), key
        return (3 if key == "$defs" else 1), 0, key

    def visit(node: Schema) -> Schema:
        return {key: node[key] for key in sorted(node, key=rank)}

    return _walk(schema, visit)


def _name_of(reference: object) -> str:
    """Return the definition that a `$ref` names, or an empty text."""
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        return reference.removeprefix("#/$defs/").replace("~1", "/").replace("~0", "~")
    return ""


def _inline(node: Any, definitions: Schema, open_names: tuple[str, ...]) -> Any:
    if isinstance(node, list):
        return [_inline(entry, definitions, open_names) for entry in node]
    if not isinstance(node, dict):
        return node
    target = _name_of(node.get("$ref"))
    rest = {key: value for key, value in node.items() if key != "$ref"}
    if target in open_names:
        return {"type": "object", "description": f"the same shape as the {target} around it", **rest}
    if target:
        return _inline({**copy.deepcopy(definitions[target]), **rest}, definitions, (*open_names, target))
    rest.pop("discriminator", None)
    for key in (*_ONE, *_MANY):
        if key in rest:
            rest[key] = _inline(rest[key], definitions, open_names)
    for key in ("properties", "patternProperties"):
        if key in rest:
            rest[key] = {name: _inline(entry, definitions, open_names) for name, entry in rest[key].items()}
    return rest


class _Strict:
    """Rewrites a schema for OpenAI's strict mode."""

    def __init__(self, schema: Schema, tool: str) -> None:
        self._schema = schema
        self._definitions: Schema = schema.get("$defs", {})
        self._tool = tool
        self._parameter = ""
        self._used: Schema = {}
        """Definitions that are referred to, rewritten."""

    def result(self) -> Schema:
        schema = self._schema
        definitions = schema.pop("$defs", {})
        properties = schema.get("properties", {})
        if schema.get("additionalProperties"):
            raise self._refuse("takes arguments of any name (**kwargs)")
        done: Schema = {
            "type": "object",
            "properties": {},
            "required": list(properties),
            "additionalProperties": False,
        }
        for name, entry in properties.items():
            self._parameter = name
            done["properties"][name] = self._property(entry, name in schema.get("required", ()))
        if self._used:
            done["$defs"] = {name: self._used[name] for name in definitions if name in self._used}
        return _ordered(done)

    def _refuse(self, reason: str) -> ToolDefinitionError:
        where = f"parameter {self._parameter!r} " if self._parameter else ""
        return ToolDefinitionError(
            f"tool {self._tool}: {where}{reason}, which strict mode cannot express",
            remedy="use the dialect 'openai'",
        )

    def _property(self, node: Schema, required: bool) -> Schema:
        node = dict(node)
        has_default, default = "default" in node, node.pop("default", None)
        done = self._node(node)
        if required:
            return done
        note = (
            f"Default: {json.dumps(default, ensure_ascii=False)}."
            if has_default and default is not None
            else ""
        )
        description = " ".join(part for part in (done.pop("description", ""), note) if part)
        done = _nullable(done)
        return {**done, "description": description} if description else done

    def _node(self, node: Schema) -> Schema:
        node = dict(node)
        target = _name_of(node.get("$ref"))
        if target and len(node) > 1:  # strict mode takes no key beside $ref
            own = {key: value for key, value in node.items() if key != "$ref"}
            return self._node({**copy.deepcopy(self._definitions[target]), **own})
        if target and target not in self._used:
            self._used[target] = {}  # a recursive type meets itself
            self._used[target] = self._node(self._definitions[target])
        if "oneOf" in node:
            node["anyOf"] = node.pop("oneOf")
        if len(node.get("allOf", ())) == 1:
            node = {**node.pop("allOf")[0], **node}
        if "prefixItems" in node:
            node["items"] = {"anyOf": node.pop("prefixItems")}
        if not {"$ref", "type", "anyOf", "enum", "const"} & node.keys():
            raise self._refuse("takes any JSON value")
        if node.get("format") not in _STRICT_FORMATS:
            node.pop("format", None)
        if node.get("type") == "object":
            return self._object(node)
        if "items" in node:
            node["items"] = self._node(node["items"])
        elif node.get("type") == "array":
            raise self._refuse("holds a list of any JSON values")
        if "anyOf" in node:
            node["anyOf"] = [self._node(entry) for entry in node["anyOf"]]
        return {key: value for key, value in node.items() if key in _STRICT_KEYS}

    def _object(self, node: Schema) -> Schema:
        if node.get("additionalProperties") or "patternProperties" in node or "properties" not in node:
            raise self._refuse("holds a mapping with free keys")
        required = node.get("required", ())
        done: Schema = {"type": "object"}
        if "description" in node:
            done["description"] = node["description"]
        done["properties"] = {
            name: self._property(entry, name in required) for name, entry in node["properties"].items()
        }
        done["required"] = list(node["properties"])
        done["additionalProperties"] = False
        return done


def _nullable(node: Schema) -> Schema:
    """Return a schema that takes null too."""
    kind = node.get("type")
    if isinstance(kind, str) and "anyOf" not in node and kind not in {"object", "null"}:
        node = {**node, "type": [kind, "null"]}
        if "enum" in node:
            node["enum"] = [*node["enum"], None]
        if "const" in node:
            node["enum"] = [node.pop("const"), None]
        return node
    if isinstance(kind, list):
        return node if "null" in kind else {**node, "type": [*kind, "null"]}
    if any(entry.get("type") == "null" for entry in node.get("anyOf", ())):
        return node
    if set(node) == {"anyOf"}:
        return {"anyOf": [*node["anyOf"], {"type": "null"}]}
    return node if kind == "null" else {"anyOf": [node, {"type": "null"}]}
