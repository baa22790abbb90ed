"""Any annotation, any value, any text: a call reaches the function whole, or is refused in one line."""

from __future__ import annotations

import asyncio
import json
from dataclasses import make_dataclass
from datetime import date
from enum import Enum
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core import ToolDefinitionError, ToolErrorKind
from agentenv.core.messages import ArgumentError
from agentenv.tools import Tool
from agentenv.tools.arguments import parse_object
from agentenv.tools.content import to_content


class Level(Enum):
    LOW = "low"
    HIGH = "high"


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
# Annotation, values, and how a value is written in JSON.
SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, st.integers(-(10**20), 10**20)),
    (float, FINITE),
    (str, TEXT),
    (bool, st.booleans()),
    (date, st.dates()),
    (Level, st.sampled_from(Level)),
    (Literal["a", 1] | None, st.sampled_from(["a", 1, None])),
]


def _inside(
    child: tuple[Any, st.SearchStrategy[Any]],
) -> st.SearchStrategy[tuple[Any, st.SearchStrategy[Any]]]:
    kind, values = child
    record = make_dataclass("Record", [("first", kind), ("second", kind)], frozen=True)
    choices: list[tuple[Any, st.SearchStrategy[Any]]] = [
        (list[kind], st.lists(values, max_size=3)),
        (dict[str, kind], st.dictionaries(TEXT, values, max_size=3)),
        (tuple[kind, int], st.tuples(values, st.integers(-9, 9))),
        (tuple[kind, ...], st.lists(values, max_size=3).map(tuple)),
        (kind | None, st.none() | values),
        (record, st.builds(record, values, values)),
    ]
    return st.sampled_from(choices)


ANNOTATIONS = st.recursive(st.sampled_from(SCALARS), lambda inner: inner.flatmap(_inside), max_leaves=4)


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw the annotations of a function and values that fit them."""
    drawn = draw(st.lists(ANNOTATIONS, min_size=1, max_size=3))
    annotations = {f"p{index}": kind for index, (kind, _) in enumerate(drawn)}
    return annotations, {f"p{index}": draw(values) for index, (_, values) in enumerate(drawn)}


def recorder(annotations: dict[str, Any], seen: dict[str, Any]) -> Tool[..., Any]:
    """Make a tool with these parameters that keeps what it receives."""
    namespace: dict[str, Any] = {"seen": seen}
    exec(f"def record({', '.join(annotations)}): seen.update(locals())", namespace)
    namespace["record"].__annotations__ = annotations
    return Tool.from_function(namespace["record"])


@given(calls())
@settings(max_examples=40)
def test_what_the_schema_allows_arrives_as_declared(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    annotations, values = case
    seen: dict[str, Any] = {}
    made = recorder(annotations, seen)
    text = json.dumps({name: json.loads(_as_json(value)) for name, value in values.items()})

    result = asyncio.run(made.call(text))

    assert not result.is_error, (result.text, text, made.parameters)
    assert {name: seen[name] for name in values} == values
    assert _fits(json.loads(text), made.parameters, made.parameters.get("$defs", {}))
    assert _fits(json.loads(text), made.schema("inline")["function"]["parameters"], {})


def _as_json(value: Any) -> str:
    """Write a value as JSON, with text and null quoted too."""
    return str(to_content([value]))[1:-1]


def _fits(value: Any, schema: dict[str, Any], definitions: dict[str, Any]) -> bool:
    """A plain reading of the parts of JSON Schema that tools use; independent of pydantic."""
    if "$ref" in schema:
        return _fits(value, definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    if "anyOf" in schema:
        return any(_fits(value, member, definitions) for member in schema["anyOf"])
    if "enum" in schema:
        return any(value == entry and type(value) is type(entry) for entry in schema["enum"])
    match schema.get("type"):
        case "integer":
            return type(value) is int
        case "number":
            return type(value) in {int, float}
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            if not isinstance(value, list):
                return False
            heads = schema.get("prefixItems")
            if heads is not None:
                return len(value) == len(heads) and all(
                    map(lambda v, s: _fits(v, s, definitions), value, heads)
                )
            return all(_fits(entry, schema["items"], definitions) for entry in value)
        case "object":
            if not isinstance(value, dict) or not set(schema.get("required", ())) <= set(value):
                return False
            named = schema.get("properties", {})
            rest = schema.get("additionalProperties", True)
            return all(
                _fits(entry, named[key], definitions)
                if key in named
                else rest is True or (isinstance(rest, dict) and _fits(entry, rest, definitions))
                for key, entry in value.items()
            )
    return True


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.sampled_from(["p0", "p1"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(calls(), st.dictionaries(st.sampled_from(["p0", "p1", "p2", "q"]), JSON, max_size=4))
@settings(max_examples=40)
def test_any_json_is_taken_or_refused_in_one_short_line(
    case: tuple[dict[str, Any], dict[str, Any]], arguments: dict[str, Any]
) -> None:
    seen: dict[str, Any] = {}

    result = asyncio.run(recorder(case[0], seen).call(json.dumps(arguments)))

    assert result.error_kind in {None, ToolErrorKind.BAD_ARGUMENTS}
    if result.is_error:
        assert not seen
        assert "\n" not in result.text
        assert len(result.text) < 1000


@given(st.text(max_size=60) | st.text(alphabet='{}[]":,\\ud8a 0e9.-NaInfity', max_size=40))
def test_any_text_is_an_object_or_a_refusal(text: str) -> None:
    try:
        parsed = parse_object(text)
    except ArgumentError as error:
        refusal = error.text
    else:
        assert json.loads(parsed.text) == parsed.values
        json.dumps(parsed.values, ensure_ascii=False, allow_nan=False).encode()
        return

    assert refusal
    assert "\n" not in refusal


@given(calls())
@settings(max_examples=40)
def test_strict_mode_says_everything_or_refuses(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    made = recorder(case[0], {})
    try:
        strict = made.schema("strict")["function"]["parameters"]
    except ToolDefinitionError:
        strict = None
    if strict is None:
        assert "additionalProperties" in json.dumps(made.parameters)
        return

    assert strict["required"] == list(case[0])
    assert '"default"' not in json.dumps(strict)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.booleans()), inner, max_size=3
        )
        | st.frozensets(st.integers() | st.text(max_size=3), max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_any_result_is_text_that_encodes_and_json_that_parses(value: object) -> None:
    content = to_content(value)

    assert isinstance(content, str)
    content.encode()
    if not isinstance(value, str):
        json.loads(content, parse_constant=lambda name: 1 / 0)
    assert to_content(value) == content
