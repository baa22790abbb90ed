"""The signatures that function-to-tool converters get wrong: each named, each with its schema and its call.

A case holds when the schema is right, a valid call reaches the function with the declared Python
types, and an invalid one is refused with the field named and the function not run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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


INT, TEXT, NUMBER, NULL = ({"type": kind} for kind in ("integer", "string", "number", "null"))


def array(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def fixed(*items: Any) -> dict[str, Any]:
    return {"type": "array", "prefixItems": list(items), "minItems": len(items), "maxItems": len(items)}


def closed(required: list[str], closed: bool = True, **properties: Any) -> dict[str, Any]:
    """The schema of an object, which takes no other properties unless it is a model of pydantic."""
    shut = {"additionalProperties": False} if closed else {}
    return {"type": "object", "properties": properties, "required": required, **shut}


DEFINITIONS = {
    "Item": closed(["name", "count"], False, name=TEXT, count=INT | {"minimum": 1}),
    "Order": closed(["items"], False, items=array({"$ref": "#/$defs/Item"})),
    "Point": closed(["x"], x=INT, y=NUMBER | {"default": 0.5}),
    "Filter": closed(["text"], text=TEXT, limit=INT),
    "Tree": closed(["label"], False, label=TEXT, children=array({"$ref": "#/$defs/Tree"}, default=[])),
    "Settings": {"type": "object", "properties": {"depth": INT | {"default": 3}}},
    "Span": fixed(INT, INT),
}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


@dataclass(frozen=True)
class Case:
    function: Callable[..., object]
    schema: dict[str, Any]
    """JSON Schema of the arguments, without `type: object` and the definitions."""
    call: str
    seen: tuple[Any, ...]
    """What the function must receive, types included."""
    refused: str = ""
    names: str = ""
    """Field that the refusal must name."""


NOTHING = object()


def of_x(
    annotation: Any, schema: Any, given: Any, seen: Any, refused: Any = NOTHING, names: str = "x",
    default: Any = NOTHING, required: bool = True,
) -> Case:  # fmt: skip
    """A case of a function with one parameter, `x`."""

    def take(x: Any) -> None:
        SEEN.append(x)

    take.__annotations__ = {"x": annotation}
    if default is not NOTHING:
        take.__defaults__ = (default,)
    wanted = {"properties": {"x": schema}} | ({"required": ["x"]} if required and default is NOTHING else {})
    call, wrong = (json.dumps({} if value is NOTHING else {"x": value}) for value in (given, refused))
    return Case(take, wanted, call, (seen,), "" if refused is NOTHING else wrong, names)


def defaults_with_coercion(a: int, b: int = 2) -> None:
    """Take two.

    Args:
        a: First.
        b: Second.
    """
    SEEN.extend([a, b])


def star_args(first: str, *numbers: float) -> None:
    """Take many.

    Args:
        first: One.
        *numbers: The rest.
    """
    SEEN.extend([first, numbers])


def star_kwargs(first: str, **weights: float) -> None:
    SEEN.extend([first, weights])


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


def reserved_names(schema: int, copy: int, _private: int, model_config: int, self_: int) -> None:
    SEEN.extend([schema, copy, _private, model_config, self_])


def choices_in_docstring(drink: str, size: int = 1) -> None:
    """Drink.

    Args:
        drink: What (choices: ["tea", "coffee"])
        size: How much (choices: [1, 2])
    """
    SEEN.extend([drink, size])


def plain(required: list[str], /, **properties: Any) -> dict[str, Any]:
    return {"properties": properties, "required": required}


KEY = "12345678123456781234567812345678"
X_AND_Y = plain(["x"], x=INT, y=INT | {"default": 3})
RESERVED = ("schema", "copy", "_private", "model_config", "self_")
WHO = TEXT | {"description": "Who."}
CASES: dict[str, Case] = {
    # One parameter: annotation, schema, what a model gives, what arrives, what is refused, and the words.
    "Literal": of_x(
        Literal["fast", "slow"], TEXT | {"enum": ["fast", "slow"]}, "slow", "slow", "medium",
        "x: should be 'fast' or 'slow'",
    ),
    "Literal of mixed types": of_x(
        Literal["a", 1, None],  # noqa: PYI061 - the spelling under test
        {"type": ["string", "integer", "null"], "enum": ["a", 1, None]}, 1, 1, 2, "x: should be",
    ),
    "Enum delivered as a member": of_x(
        Color, TEXT | {"enum": ["red", "blue"]}, "blue", Color.BLUE, "green", "x: should be 'red' or 'blue'"
    ),
    "Optional": of_x(
        Optional[int],  # noqa: UP045 - the spelling under test
        {"anyOf": [INT, NULL], "default": None}, None, None, "many", "x: should be a valid integer", default=None,
    ),
    "int | str": of_x(
        int | str, {"anyOf": [INT, TEXT]}, "5", "5", [1],
        "x: should be a valid integer or should be a valid string",
    ),
    "nested pydantic model with a constraint": of_x(
        Order, ref("Order"), {"items": [{"name": "pen", "count": "3"}]}, Order(items=[Item(name="pen", count=3)]),
        {"items": [{"name": "pen", "count": 0}]}, "x.items[0].count: should be greater than or equal to 1",
    ),
    "dataclass with a default": of_x(Point, ref("Point"), {"x": 1}, Point(1, 0.5), {"y": 1}, "x.x: field required"),
    "typing.TypedDict with NotRequired on Python 3.11": of_x(
        Filter, ref("Filter"), {"text": "a"}, {"text": "a"}, {"limit": 3}, "x.text: field required"
    ),
    "recursive model": of_x(
        Tree, ref("Tree"), {"label": "a", "children": [{"label": "b"}]}, Tree(label="a", children=[Tree(label="b")]),
        {"label": "a", "children": [{}]}, "x.children[0].label: field required",
    ),
    "Annotated with Field": of_x(
        Annotated[str, Field(description="Who.", min_length=2)], WHO | {"minLength": 2}, "Al", "Al", "A",
        "x: String should have at least 2 characters",
    ),
    "Annotated with a plain description": of_x(Annotated[str, "Who."], WHO, "Al", "Al"),
    "Annotated with Doc": of_x(Annotated[str, Doc("Who.")], WHO, "Al", "Al"),
    "datetime": of_x(
        datetime, TEXT | {"format": "date-time"}, "2026-01-02T03:04:05",
        datetime(2026, 1, 2, 3, 4, 5),  # noqa: DTZ001 - what the text says
        "yesterday", "x: should be a valid datetime",
    ),
    "date": of_x(date, TEXT | {"format": "date"}, "2026-01-02", date(2026, 1, 2)),
    "UUID": of_x(UUID, TEXT | {"format": "uuid"}, KEY, UUID(KEY)),
    "tuple[int, str]": of_x(tuple[int, str], fixed(INT, TEXT), [1, "a"], (1, "a"), [1]),
    "NamedTuple": of_x(Span, ref("Span"), [1, 2], Span(1, 2)),
    "dict[str, Model]": of_x(
        dict[str, Item], {"type": "object", "additionalProperties": ref("Item")}, {"a": {"name": "pen", "count": 1}},
        {"a": Item(name="pen", count=1)}, {"a": {"name": "pen"}}, "x.a.count: field required",
    ),
    "set": of_x(set[str], array(TEXT, uniqueItems=True), ["a", "b", "a"], {"a", "b"}, "a"),
    "union of containers": of_x(
        Union[list[Item], Item, None],  # noqa: UP007 - the spelling under test
        {"default": None, "anyOf": [array(ref("Item")), ref("Item"), NULL]}, [{"name": "a", "count": 1}],
        [Item(name="a", count=1)], default=None,
    ),
    "Sequence of typing.TypedDict": of_x(
        Sequence[Filter], array(ref("Filter")), [{"text": "a", "limit": 1}], [{"text": "a", "limit": 1}]
    ),
    "Iterable is checked before the call": of_x(
        Iterable[int], array(INT), ["1"], [1], ["x"], "x[0]: should be a valid integer"
    ),
    "Any": of_x(Any, {}, {"a": [1, None]}, {"a": [1, None]}),
    "pydantic instance as default": of_x(
        Settings, ref("Settings") | {"default": {"depth": 5}}, NOTHING, Settings(depth=5), {"depth": "deep"},
        "x.depth: should be a valid integer", default=Settings(depth=5),
    ),
    "Field as default": of_x(
        int, INT | {"description": "How many.", "default": 3, "minimum": 0}, NOTHING, 3, -1,
        "x: should be greater than or equal to 0", default=Field(3, ge=0, description="How many."),
    ),
    "no docstring": of_x(int, INT, 1, 1, NOTHING),
    # Several parameters.
    "defaults and coercion of '5' to 5": Case(
        defaults_with_coercion,
        plain(["a"], a=INT | {"description": "First."}, b=INT | {"description": "Second.", "default": 2}),
        '{"a": "5"}', (5, 2), '{"b": 1}', "a: field required",
    ),
    "*args": Case(
        star_args, plain(["first"], first=TEXT | {"description": "One."}, numbers=array(NUMBER, description="The rest.")),
        '{"first": "a", "numbers": ["1", 2.5]}', ("a", (1.0, 2.5)),
        '{"first": "a", "numbers": ["x"]}', "numbers[0]: should be a valid number",
    ),
    "**kwargs": Case(
        star_kwargs, plain(["first"], first=TEXT) | {"additionalProperties": NUMBER},
        '{"first": "a", "x": "1", "y": 2}', ("a", {"x": 1.0, "y": 2.0}),
        '{"first": "a", "x": "one"}', "x: should be a valid number",
    ),
    "keyword-only": Case(keyword_only, plain(["x"], x=INT, y=INT | {"default": 1}), '{"x": 2}', (2, 1)),
    "positional-only": Case(positional_only, plain(["x", "y"], x=INT, y=INT), '{"y": 2, "x": 1}', (1, 2)),
    "Context is filled in and hidden": Case(
        injected_context, X_AND_Y, '{"x": 1}', (1, Context, 3), '{"x": 1, "context": {}}',
        "context: unknown argument; the arguments are x, y",
    ),
    "Context | None is filled in and hidden": Case(optional_context, plain(["x"], x=INT), '{"x": 1}', (Context, 1)),
    "**kwargs: Unpack[TypedDict]": Case(
        unpacked_kwargs, plain(["x"], x=INT, verbose={"type": "boolean"}), '{"x": 1}', (1, {}),
        '{"x": 1, "quiet": true}', "quiet: unknown argument",
    ),
    "names that pydantic reserves": Case(
        reserved_names, plain(list(RESERVED), **dict.fromkeys(RESERVED, INT)),
        json.dumps(dict(zip(RESERVED, range(5), strict=True))), (0, 1, 2, 3, 4),
    ),
    "choices in the docstring": Case(
        choices_in_docstring,
        plain(
            ["drink"],
            drink=TEXT | {"description": "What", "enum": ["tea", "coffee"]},
            size=INT | {"description": "How much", "enum": [1, 2], "default": 1},
        ),
        '{"drink": "tea", "size": "2"}', ("tea", 2), '{"drink": "milk"}', 'drink: should be one of "tea", "coffee"',
    ),
}  # fmt: skip
all_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@all_cases
def test_schema(case: Case) -> None:
    made = Tool.from_function(case.function)
    parameters, inline = made.parameters, str(made.schema("inline"))
    definitions = parameters.pop("$defs", {})
    text = str([parameters, definitions])

    assert parameters == {"type": "object", **case.schema}
    assert definitions == {name: DEFINITIONS[name] for name in definitions}
    assert set(definitions) == {name for name in DEFINITIONS if f"#/$defs/{name}'" in text}
    assert "$ref" not in inline
    assert "$defs" not in inline


@all_cases
async def test_valid_call_delivers_the_declared_types(case: Case) -> None:
    SEEN.clear()

    result = await Tool.from_function(case.function).call(case.call)

    assert not result.is_error, result
    assert tuple(SEEN) == case.seen
    assert [type(value) for value in SEEN] == [type(value) for value in case.seen]


@pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if case.refused],
    ids=[name for name, case in CASES.items() if case.refused],
)
async def test_invalid_call_is_refused_with_the_field_named(case: Case) -> None:
    SEEN.clear()

    result = await Tool.from_function(case.function).call(case.refused)

    assert result.error_kind is ToolErrorKind.BAD_ARGUMENTS
    assert case.names in result.text
    assert "\n" not in result.text
    assert SEEN == []


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


class Early:
    @tool
    def take(self, link: Link) -> int:
        return link.weight


class Link(BaseModel):
    weight: int


async def test_a_method_may_name_its_own_class_a_local_one_and_one_that_stands_below_it() -> None:
    class Local(BaseModel):
        x: int

    @dataclass
    class Node:
        value: int = 0

        @tool
        def add(self, other: Node) -> int:
            return self.value + other.value

    @tool
    def take(value: Local, more: list[Local]) -> None: ...

    assert list(take.parameters["properties"]) == ["value", "more"]
    assert (await Node(1).add.call({"other": {"value": 2}})).content == "3"
    assert (await Early().take.call({"link": {"weight": 2}})).content == "2"
