"""The signatures that function-to-tool converters get wrong: each named, each with its schema and its call.

A case holds when the schema is right, a valid call reaches the function with the declared Python
types, and an invalid one is refused with the field named and the function not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional, TypedDict, Union
from uuid import UUID

import pytest
from pydantic import BaseModel, Field
from typing_extensions import Doc, Unpack

from agentenv.core import Context, ToolErrorKind
from agentenv.tools import Tool, tool

SEEN: list[Any] = []


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Item(BaseModel):
    name: str
    count: int = Field(ge=1)


class Order(BaseModel):
    items: list[Item]


class Tree(BaseModel):
    label: str
    children: list[Tree] = []


class Settings(BaseModel):
    depth: int = 3


@dataclass
class Point:
    x: int
    y: float = 0.5


class Filter(TypedDict):
    text: str
    limit: NotRequired[int]


class Options(TypedDict, total=False):
    verbose: bool


class Span(NamedTuple):
    start: int
    end: int


@dataclass(frozen=True)
class Case:
    function: Callable[..., object]
    schema: dict[str, Any]
    """JSON Schema of the arguments, without `type: object`."""
    call: str
    seen: tuple[Any, ...]
    """What the function must receive, types included."""
    refused: str | None = None
    names: str = ""
    """Field that the refusal must name."""
    definitions: dict[str, Any] = field(default_factory=dict)


def defaults_with_coercion(a: int, b: int = 2) -> None:
    """Take two.

    Args:
        a: First.
        b: Second.
    """
    SEEN.extend([a, b])


def literal(mode: Literal["fast", "slow"]) -> None:
    SEEN.append(mode)


def literal_mixed(value: Literal["a", 1, None]) -> None:  # noqa: PYI061 - the spelling under test
    SEEN.append(value)


def enum(color: Color) -> None:
    SEEN.append(color)


def optional(x: Optional[int] = None) -> None:  # noqa: UP045 - the spelling under test
    SEEN.append(x)


def union(x: int | str) -> None:
    SEEN.append(x)


def nested_model(order: Order) -> None:
    SEEN.append(order)


def dataclass_with_default(point: Point) -> None:
    SEEN.append(point)


def typed_dict_not_required(where: Filter) -> None:
    SEEN.append(where)


def recursive_model(tree: Tree) -> None:
    SEEN.append(tree)


def annotated_field(name: Annotated[str, Field(description="Who.", min_length=2)]) -> None:
    SEEN.append(name)


def annotated_text(name: Annotated[str, "Who."]) -> None:
    SEEN.append(name)


def date_time(when: datetime) -> None:
    SEEN.append(when)


def fixed_tuple(pair: tuple[int, str]) -> None:
    SEEN.append(pair)


def dict_of_models(items: dict[str, Item]) -> None:
    SEEN.append(items)


def set_of_text(tags: set[str]) -> None:
    SEEN.append(tags)


def star_args(first: str, *numbers: float) -> None:
    """Take many.

    Args:
        first: One.
        *numbers: The rest.
    """
    SEEN.extend([first, numbers])


def star_kwargs(first: str, **weights: float) -> None:
    SEEN.extend([first, weights])


def no_docstring(x: int) -> None:
    SEEN.append(x)


def numpy_docstring(x: int) -> None:
    """Take one.

    Parameters
    ----------
    x : int
        The one.
    """
    SEEN.append(x)


def sphinx_docstring(x: int) -> None:
    """Take one.

    :param x: The one.
    """
    SEEN.append(x)


def model_as_default(settings: Settings = Settings(depth=5)) -> None:  # noqa: B008 - the habit under test
    SEEN.append(settings)


ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer", "minimum": 1}},
    "required": ["name", "count"],
}
TABLE: dict[str, Case] = {
    "defaults and coercion of '5' to 5": Case(
        defaults_with_coercion,
        {
            "properties": {
                "a": {"type": "integer", "description": "First."},
                "b": {"type": "integer", "description": "Second.", "default": 2},
            },
            "required": ["a"],
        },
        '{"a": "5"}',
        (5, 2),
        '{"b": 1}',
        "a: field required",
    ),
    "Literal": Case(
        literal,
        {"properties": {"mode": {"type": "string", "enum": ["fast", "slow"]}}, "required": ["mode"]},
        '{"mode": "slow"}',
        ("slow",),
        '{"mode": "medium"}',
        "mode: should be 'fast' or 'slow'",
    ),
    "Literal of mixed types": Case(
        literal_mixed,
        {
            "properties": {"value": {"type": ["string", "integer", "null"], "enum": ["a", 1, None]}},
            "required": ["value"],
        },
        '{"value": 1}',
        (1,),
        '{"value": 2}',
        "value: should be",
    ),
    "Enum delivered as a member": Case(
        enum,
        {"properties": {"color": {"type": "string", "enum": ["red", "blue"]}}, "required": ["color"]},
        '{"color": "blue"}',
        (Color.BLUE,),
        '{"color": "green"}',
        "color: should be 'red' or 'blue'",
    ),
    "Optional": Case(
        optional,
        {"properties": {"x": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}}},
        '{"x": null}',
        (None,),
        '{"x": "many"}',
        "x: should be a valid integer",
    ),
    "int | str": Case(
        union,
        {"properties": {"x": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}, "required": ["x"]},
        '{"x": "5"}',
        ("5",),
        '{"x": [1]}',
        "x: should be a valid integer or should be a valid string",
    ),
    "nested pydantic model with a constraint": Case(
        nested_model,
        {"properties": {"order": {"$ref": "#/$defs/Order"}}, "required": ["order"]},
        '{"order": {"items": [{"name": "pen", "count": "3"}]}}',
        (Order(items=[Item(name="pen", count=3)]),),
        '{"order": {"items": [{"name": "pen", "count": 0}]}}',
        "order.items[0].count: should be greater than or equal to 1",
        {
            "Item": ITEM,
            "Order": {
                "type": "object",
                "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/Item"}}},
                "required": ["items"],
            },
        },
    ),
    "dataclass with a default": Case(
        dataclass_with_default,
        {"properties": {"point": {"$ref": "#/$defs/Point"}}, "required": ["point"]},
        '{"point": {"x": 1}}',
        (Point(1, 0.5),),
        '{"point": {"y": 1}}',
        "point.x: field required",
        {
            "Point": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "number", "default": 0.5}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    ),
    "typing.TypedDict with NotRequired on Python 3.11": Case(
        typed_dict_not_required,
        {"properties": {"where": {"$ref": "#/$defs/Filter"}}, "required": ["where"]},
        '{"where": {"text": "a"}}',
        ({"text": "a"},),
        '{"where": {"limit": 3}}',
        "where.text: field required",
        {
            "Filter": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["text"],
                "additionalProperties": False,
            }
        },
    ),
    "recursive model": Case(
        recursive_model,
        {"properties": {"tree": {"$ref": "#/$defs/Tree"}}, "required": ["tree"]},
        '{"tree": {"label": "a", "children": [{"label": "b"}]}}',
        (Tree(label="a", children=[Tree(label="b")]),),
        '{"tree": {"label": "a", "children": [{}]}}',
        "tree.children[0].label: field required",
        {
            "Tree": {
                "type": "object",
                "properties": {
                    "label": {"type": "string"},
                    "children": {"type": "array", "default": [], "items": {"$ref": "#/$defs/Tree"}},
                },
                "required": ["label"],
            }
        },
    ),
    "Annotated with Field": Case(
        annotated_field,
        {
            "properties": {"name": {"type": "string", "description": "Who.", "minLength": 2}},
            "required": ["name"],
        },
        '{"name": "Al"}',
        ("Al",),
        '{"name": "A"}',
        "name: String should have at least 2 characters",
    ),
    "Annotated with a plain description": Case(
        annotated_text,
        {"properties": {"name": {"type": "string", "description": "Who."}}, "required": ["name"]},
        '{"name": "Al"}',
        ("Al",),
    ),
    "datetime": Case(
        date_time,
        {"properties": {"when": {"type": "string", "format": "date-time"}}, "required": ["when"]},
        '{"when": "2026-01-02T03:04:05"}',
        (datetime(2026, 1, 2, 3, 4, 5),),  # noqa: DTZ001 - what the text says
        '{"when": "yesterday"}',
        "when: should be a valid datetime",
    ),
    "tuple[int, str]": Case(
        fixed_tuple,
        {
            "properties": {
                "pair": {
                    "type": "array",
                    "prefixItems": [{"type": "integer"}, {"type": "string"}],
                    "minItems": 2,
                    "maxItems": 2,
                }
            },
            "required": ["pair"],
        },
        '{"pair": [1, "a"]}',
        ((1, "a"),),
        '{"pair": [1]}',
        "pair",
    ),
    "dict[str, Model]": Case(
        dict_of_models,
        {
            "properties": {"items": {"type": "object", "additionalProperties": {"$ref": "#/$defs/Item"}}},
            "required": ["items"],
        },
        '{"items": {"a": {"name": "pen", "count": 1}}}',
        ({"a": Item(name="pen", count=1)},),
        '{"items": {"a": {"name": "pen"}}}',
        "items.a.count: field required",
        {"Item": ITEM},
    ),
    "set": Case(
        set_of_text,
        {
            "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
            "required": ["tags"],
        },
        '{"tags": ["a", "b", "a"]}',
        ({"a", "b"},),
        '{"tags": "a"}',
        "tags",
    ),
    "*args": Case(
        star_args,
        {
            "properties": {
                "first": {"type": "string", "description": "One."},
                "numbers": {"type": "array", "description": "The rest.", "items": {"type": "number"}},
            },
            "required": ["first"],
        },
        '{"first": "a", "numbers": ["1", 2.5]}',
        ("a", (1.0, 2.5)),
        '{"first": "a", "numbers": ["x"]}',
        "numbers[0]: should be a valid number",
    ),
    "**kwargs": Case(
        star_kwargs,
        {
            "properties": {"first": {"type": "string"}},
            "required": ["first"],
            "additionalProperties": {"type": "number"},
        },
        '{"first": "a", "x": "1", "y": 2}',
        ("a", {"x": 1.0, "y": 2.0}),
        '{"first": "a", "x": "one"}',
        "x: should be a valid number",
    ),
    "no docstring": Case(
        no_docstring,
        {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
        '{"x": 1}',
        (1,),
        "{}",
        "x",
    ),
    "NumPy docstring": Case(
        numpy_docstring,
        {"properties": {"x": {"type": "integer", "description": "The one."}}, "required": ["x"]},
        '{"x": 1}',
        (1,),
    ),
    "Sphinx docstring": Case(
        sphinx_docstring,
        {"properties": {"x": {"type": "integer", "description": "The one."}}, "required": ["x"]},
        '{"x": 1}',
        (1,),
    ),
    "pydantic instance as default": Case(
        model_as_default,
        {"properties": {"settings": {"$ref": "#/$defs/Settings", "default": {"depth": 5}}}},
        "{}",
        (Settings(depth=5),),
        '{"settings": {"depth": "deep"}}',
        "settings.depth: should be a valid integer",
        {"Settings": {"type": "object", "properties": {"depth": {"type": "integer", "default": 3}}}},
    ),
}


def epydoc_docstring(x: int) -> None:
    """Take one.

    @param x: The one.
    """
    SEEN.append(x)


def annotated_doc(name: Annotated[str, Doc("Who.")]) -> None:
    SEEN.append(name)


def field_as_default(x: int = Field(3, ge=0, description="How many.")) -> None:
    SEEN.append(x)


def keyword_only(*, x: int, y: int = 1) -> None:
    SEEN.extend([x, y])


def positional_only(x: int, /, y: int) -> None:
    SEEN.extend([x, y])


def injected_context(x: int, context: Context, y: int = 3) -> None:
    SEEN.extend([x, type(context), y])


def optional_context(context: Context | None, x: int) -> None:
    SEEN.extend([type(context), x])


def unpacked_kwargs(x: int, **options: Unpack[Options]) -> None:
    SEEN.extend([x, options])


def named_tuple(span: Span) -> None:
    SEEN.append(span)


def deep_union(x: Union[list[Item], Item, None] = None) -> None:  # noqa: UP007 - the spelling under test
    SEEN.append(x)


def uuid_and_date(key: UUID, day: date) -> None:
    SEEN.extend([key, day])


def reserved_names(schema: int, copy: int, _private: int, model_config: int, self_: int) -> None:
    SEEN.extend([schema, copy, _private, model_config, self_])


def sequence_of_typed_dicts(rows: Sequence[Filter]) -> None:
    SEEN.append(rows)


def iterable(numbers: Iterable[int]) -> None:
    SEEN.append(numbers)


def anything(x: Any) -> None:
    SEEN.append(x)


def choices_in_docstring(drink: str, size: int = 1) -> None:
    """Drink.

    Args:
        drink: What (choices: ["tea", "coffee"])
        size: How much (choices: [1, 2])
    """
    SEEN.extend([drink, size])


MORE: dict[str, Case] = {
    "Epydoc docstring": Case(
        epydoc_docstring,
        {"properties": {"x": {"type": "integer", "description": "The one."}}, "required": ["x"]},
        '{"x": 1}',
        (1,),
    ),
    "Annotated with Doc": Case(
        annotated_doc,
        {"properties": {"name": {"type": "string", "description": "Who."}}, "required": ["name"]},
        '{"name": "Al"}',
        ("Al",),
    ),
    "Field as default": Case(
        field_as_default,
        {"properties": {"x": {"type": "integer", "description": "How many.", "default": 3, "minimum": 0}}},
        "{}",
        (3,),
        '{"x": -1}',
        "x: should be greater than or equal to 0",
    ),
    "keyword-only": Case(
        keyword_only,
        {"properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 1}}, "required": ["x"]},
        '{"x": 2}',
        (2, 1),
    ),
    "positional-only": Case(
        positional_only,
        {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]},
        '{"y": 2, "x": 1}',
        (1, 2),
    ),
    "Context is filled in and hidden": Case(
        injected_context,
        {"properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 3}}, "required": ["x"]},
        '{"x": 1}',
        (1, Context, 3),
        '{"x": 1, "context": {}}',
        "context: unknown argument; the arguments are x, y",
    ),
    "Context | None is filled in and hidden": Case(
        optional_context,
        {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
        '{"x": 1}',
        (Context, 1),
    ),
    "**kwargs: Unpack[TypedDict]": Case(
        unpacked_kwargs,
        {"properties": {"x": {"type": "integer"}, "verbose": {"type": "boolean"}}, "required": ["x"]},
        '{"x": 1}',
        (1, {}),
        '{"x": 1, "quiet": true}',
        "quiet: unknown argument",
    ),
    "NamedTuple": Case(
        named_tuple,
        {"properties": {"span": {"$ref": "#/$defs/Span"}}, "required": ["span"]},
        '{"span": [1, 2]}',
        (Span(1, 2),),
        definitions={
            "Span": {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "integer"}],
                "minItems": 2,
                "maxItems": 2,
            }
        },
    ),
    "union of containers": Case(
        deep_union,
        {
            "properties": {
                "x": {
                    "default": None,
                    "anyOf": [
                        {"type": "array", "items": {"$ref": "#/$defs/Item"}},
                        {"$ref": "#/$defs/Item"},
                        {"type": "null"},
                    ],
                }
            }
        },
        '{"x": [{"name": "a", "count": 1}]}',
        ([Item(name="a", count=1)],),
        definitions={"Item": ITEM},
    ),
    "UUID and date": Case(
        uuid_and_date,
        {
            "properties": {
                "key": {"type": "string", "format": "uuid"},
                "day": {"type": "string", "format": "date"},
            },
            "required": ["key", "day"],
        },
        '{"key": "12345678123456781234567812345678", "day": "2026-01-02"}',
        (UUID("12345678123456781234567812345678"), date(2026, 1, 2)),
    ),
    "names that pydantic reserves": Case(
        reserved_names,
        {
            "properties": {
                name: {"type": "integer"} for name in ("schema", "copy", "_private", "model_config", "self_")
            },
            "required": ["schema", "copy", "_private", "model_config", "self_"],
        },
        '{"schema": 1, "copy": 2, "_private": 3, "model_config": 4, "self_": 5}',
        (1, 2, 3, 4, 5),
    ),
    "Sequence of typing.TypedDict": Case(
        sequence_of_typed_dicts,
        {
            "properties": {"rows": {"type": "array", "items": {"$ref": "#/$defs/Filter"}}},
            "required": ["rows"],
        },
        '{"rows": [{"text": "a", "limit": 1}]}',
        ([{"text": "a", "limit": 1}],),
        definitions={
            "Filter": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["text"],
                "additionalProperties": False,
            }
        },
    ),
    "Iterable is checked before the call": Case(
        iterable,
        {"properties": {"numbers": {"type": "array", "items": {"type": "integer"}}}, "required": ["numbers"]},
        '{"numbers": ["1"]}',
        ([1],),
        '{"numbers": ["x"]}',
        "numbers[0]: should be a valid integer",
    ),
    "Any": Case(
        anything, {"properties": {"x": {}}, "required": ["x"]}, '{"x": {"a": [1, null]}}', ({"a": [1, None]},)
    ),
    "choices in the docstring": Case(
        choices_in_docstring,
        {
            "properties": {
                "drink": {"type": "string", "description": "What", "enum": ["tea", "coffee"]},
                "size": {"type": "integer", "description": "How much", "enum": [1, 2], "default": 1},
            },
            "required": ["drink"],
        },
        '{"drink": "tea", "size": "2"}',
        ("tea", 2),
        '{"drink": "milk"}',
        'drink: should be one of "tea", "coffee"',
    ),
}
ALL = TABLE | MORE


def test_the_table_has_22_cases() -> None:
    assert len(TABLE) == 22


@pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
def test_schema(case: Case) -> None:
    expected = {"type": "object", **case.schema}
    if case.definitions:
        expected["$defs"] = case.definitions

    parameters = Tool.from_function(case.function).parameters

    assert parameters == expected


@pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
async def test_valid_call_delivers_the_declared_types(case: Case) -> None:
    SEEN.clear()

    result = await Tool.from_function(case.function).call(case.call)

    assert not result.is_error, result
    assert tuple(SEEN) == case.seen
    assert [type(value) for value in SEEN] == [type(value) for value in case.seen]


@pytest.mark.parametrize(
    "case", [case for case in ALL.values() if case.refused], ids=lambda case: case.function.__name__
)
async def test_invalid_call_is_refused_with_the_field_named(case: Case) -> None:
    SEEN.clear()
    assert case.refused is not None

    result = await Tool.from_function(case.function).call(case.refused)

    assert result.error_kind is ToolErrorKind.BAD_ARGUMENTS
    assert case.names in result.text
    assert "\n" not in result.text
    assert SEEN == []


@pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
def test_inline_dialect_has_no_references(case: Case) -> None:
    text = str(Tool.from_function(case.function).schema("inline"))

    assert "$ref" not in text
    assert "$defs" not in text


class Shelf:
    """Every way in which a class can hold a function."""

    @tool
    def method(self, x: int) -> int:
        """Method."""
        return x

    @tool
    @classmethod
    def on_class(cls, x: int) -> str:
        """Class."""
        return f"{cls.__name__}{x}"

    @tool
    @staticmethod
    def static(x: int) -> int:
        """Static."""
        return x

    @staticmethod
    @tool
    def static_outside(x: int) -> int:
        """Static."""
        return x

    async def plain(self, x: int) -> int:
        """Plain."""
        return x

    def __call__(self, x: int) -> int:
        """Call."""
        return x


async def later(x: int) -> int:
    """Later."""
    return x


def two(x: int, y: int) -> int:
    """Two."""
    return x + y


def wrapped(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> int:
        return function(*args, **kwargs)

    return wrapper


CALLABLES: dict[str, tuple[Any, str, str]] = {
    "classmethod": (Shelf().on_class, "on_class", "Shelf7"),
    "classmethod through the class": (Shelf.on_class, "on_class", "Shelf7"),
    "staticmethod": (Shelf().static, "static", "7"),
    "staticmethod outside": (Shelf().static_outside, "static_outside", "7"),
    "bound method": (Shelf().plain, "plain", "7"),
    "callable object": (Shelf(), "Shelf", "7"),
    "async function": (later, "later", "7"),
    "partial by name": (functools.partial(two, y=1), "two", "8"),
    "partial by position": (functools.partial(two, 1), "two", "8"),
    "partial of async": (functools.partial(later), "later", "7"),
    "wrapped function": (wrapped(two), "two", ""),
}


@pytest.mark.parametrize(("entry", "name", "answer"), CALLABLES.values(), ids=CALLABLES.keys())
async def test_every_kind_of_callable_becomes_a_tool(entry: Any, name: str, answer: str) -> None:
    made = entry if isinstance(entry, Tool) else Tool.from_function(entry)

    assert made.name == name
    if answer:
        argument = next(iter(made.parameters["properties"]))
        assert list(made.parameters["properties"]) == [argument]
        assert (await made.call({argument: 7})).content == answer
    else:
        assert list(made.parameters["properties"]) == ["x", "y"]


def test_names_local_to_a_function_are_resolved() -> None:
    class Local(BaseModel):
        x: int

    @tool
    def take(value: Local, more: list[Local]) -> None: ...

    assert list(take.parameters["properties"]) == ["value", "more"]


class Early:
    @tool
    def take(self, link: Link) -> int:
        return link.weight


class Link(BaseModel):
    weight: int


async def test_a_method_may_name_a_class_that_stands_below_it() -> None:
    result = await Early().take.call({"link": {"weight": 2}})

    assert result.content == "2"


async def test_a_method_may_name_its_own_class() -> None:
    @dataclass
    class Node:
        value: int = 0

        @tool
        def add(self, other: Node) -> int:
            return self.value + other.value

    result = await Node(1).add.call({"other": {"value": 2}})

    assert result.content == "3"
