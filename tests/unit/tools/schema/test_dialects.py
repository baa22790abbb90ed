"""Dialects of a schema: strict mode's rules, references in place, the same bytes everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from enum import Enum
from typing import Annotated, Any, Generic, Literal, TypeVar

import pytest
from pydantic import BaseModel, Field

from agentenv.core import ToolDefinitionError
from agentenv.tools import Tool
from agentenv.tools.schema.dialects import schema_depth

T = TypeVar("T")


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


class Leaf(BaseModel):
    """A leaf."""

    name: str = Field(min_length=2)
    weight: float = 1.5
    unit: Unit = Unit.METRE
    note: str | None = None


class Node(BaseModel):
    label: str
    children: list[Node] = []
    leaf: Leaf = Field(description="Its leaf.")


class Box(BaseModel, Generic[T]):
    value: T


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]
    loud: bool = True


def rich(
    node: Node,
    count: Annotated[int, Field(ge=1)] = 3,
    day: date | None = None,
    pair: tuple[int, str] = (1, "a"),
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None,
    mode: Literal["fast", "slow"] = "fast",
) -> None:
    """Take much.

    Args:
        node: The node.
        count: How many.
    """


def test_strict_mode_follows_openais_rules() -> None:
    function = Tool.from_function(rich).schema("strict")["function"]

    assert function["strict"] is True
    _check_strict(function["parameters"])
    properties = function["parameters"]["properties"]
    assert properties["count"] == {
        "type": ["integer", "null"],
        "description": "How many. Default: 3.",
        "minimum": 1,
    }
    assert properties["mode"] == {
        "type": ["string", "null"],
        "enum": ["fast", "slow", None],
        "description": 'Default: "fast".',
    }
    assert properties["day"] == {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}


def _check_strict(node: Any) -> None:
    """Every object closed with all its properties required; only keys that strict mode takes."""
    if not isinstance(node, dict):
        return
    if "$ref" in node:
        assert set(node) == {"$ref"}
    if node.get("type") == "object":
        assert node["additionalProperties"] is False
        assert node["required"] == list(node["properties"])
    assert not {"default", "title", "oneOf", "allOf", "prefixItems", "uniqueItems", "minLength"} & node.keys()
    for key in ("items",):
        _check_strict(node.get(key))
    for entry in node.get("anyOf", []):
        _check_strict(entry)
    for entry in [*node.get("properties", {}).values(), *node.get("$defs", {}).values()]:
        _check_strict(entry)


async def test_what_strict_mode_lets_a_model_write_is_taken() -> None:
    seen: list[Any] = []

    def take(leaf: Leaf, count: int = 3) -> None:
        seen.extend([leaf, count])

    call = {"leaf": {"name": "ab", "weight": None, "unit": None, "note": None}, "count": None}
    result = await Tool.from_function(take).call(json.dumps(call))

    assert not result.is_error, result.text
    assert seen == [Leaf(name="ab"), 3]


def free_mapping(good: int, bad: dict[str, int]) -> None: ...
def anything(good: int, bad: Any) -> None: ...
def any_list(good: int, bad: list[Any]) -> None: ...
def bare_list(good: int, bad: list) -> None: ...  # type: ignore[type-arg]
def free_arguments(good: int, **bad: int) -> None: ...
def generic_model(good: int, bad: Box) -> None: ...  # type: ignore[type-arg]


def deep(bad: list[list[list[list[list[list[list[list[list[list[int]]]]]]]]]]) -> None: ...


@pytest.mark.parametrize(
    ("function", "told"),
    [
        *((one, r"'bad'|kwargs") for one in (free_mapping, anything, any_list, bare_list)),
        *((one, r"'bad'|kwargs") for one in (free_arguments, generic_model)),
        (deep, "11 levels deep"),
    ],
)
def test_what_strict_mode_cannot_say_is_refused_with_the_parameter_named(function: Any, told: str) -> None:
    with pytest.raises(ToolDefinitionError, match=told):
        Tool.from_function(function).schema("strict")
    with pytest.raises(ToolDefinitionError, match="unknown schema dialect 'yaml'"):
        Tool.from_function(function).schema("yaml")  # type: ignore[arg-type]


def test_inline_puts_definitions_in_place_and_says_where_a_type_repeats() -> None:
    parameters = Tool.from_function(rich).schema("inline")["function"]["parameters"]
    node = parameters["properties"]["node"]

    assert "$defs" not in parameters
    assert node["description"] == "The node."
    assert node["properties"]["leaf"]["description"] == "Its leaf."
    assert node["properties"]["leaf"]["properties"]["unit"] == {
        "type": "string",
        "enum": ["m", "ft"],
        "default": "m",
    }
    assert node["properties"]["children"]["items"] == {
        "type": "object",
        "description": "the same shape as the Node around it",
    }


def test_a_property_called_title_is_kept() -> None:
    class Book(BaseModel):
        title: str
        properties: int

    def read(title: str, book: Book) -> None: ...

    parameters = Tool.from_function(read).parameters

    assert parameters["properties"]["title"] == {"type": "string"}
    assert parameters["$defs"]["Book"]["properties"] == {
        "title": {"type": "string"},
        "properties": {"type": "integer"},
    }


RECURSIVE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}


@pytest.mark.parametrize(
    ("schema", "depth"),
    [
        ({"type": "object", "properties": {}}, 1),
        ({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}, 2),
        ({"$ref": "#/$defs/A", "$defs": {"A": RECURSIVE}}, 1),
    ],
)
def test_depth_counts_levels_and_a_recursive_type_once(schema: dict[str, Any], depth: int) -> None:
    assert schema_depth(schema) == depth


PRINT = """
from enum import Enum
from agentenv.tools import Tool
class E(Enum):
    A = "a"
    B = "b"
def f(x: set[str] = {"q", "w", "e", "r", "t", "y"}, y: frozenset[E] = frozenset(E), z: int | str | None = None): ...
import sys
sys.stdout.write(Tool.from_function(f).schema_text())
"""


def test_the_same_function_gives_the_same_bytes_in_every_process() -> None:
    command = [sys.executable, "-c", PRINT]
    texts = {
        subprocess.run(command, capture_output=True, check=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2", "3")
    }

    assert len(texts) == 1
    assert b'["e", "q", "r", "t", "w", "y"]' in texts.pop()
