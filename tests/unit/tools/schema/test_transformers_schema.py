"""Where transformers' `get_json_schema` accepts a function, ours says the same or more.

The functions have the shapes that transformers documents and tests: each of its cases once, those
it refuses included. A schema is compared by meaning: both are brought to one form in which unions
of types, `nullable` and `anyOf` with null read the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Optional, Union

import pytest

from agentenv.tools import Tool

transformers_utils = pytest.importorskip("transformers.utils.chat_template_utils")


def one(x: int):
    """Count up.

    Args:
         x: Where to start
    """


def nothing():
    """Wait."""


def bare_containers(x: list, y: tuple, z: dict):  # type: ignore[type-arg]
    """Hold.

    Args:
        x: A row
        y: A record
        z: A table
    """


def union(x: int | float):  # noqa: PYI041
    """Measure.

    Args:
        x: A number
    """


def duplicate_union(x: list | tuple, y: list | tuple | dict | None = None):  # type: ignore[type-arg]
    """Hold.

    Args:
        x: A row
        y: A row or a table
    """


def optional(x: int | None):
    """Count.

    Args:
        x: Perhaps a number
    """


def optional_old(x: Optional[str] = None, y: Union[int, str] = 3):  # noqa: UP007, UP045
    """Ask.

    Args:
        x: Perhaps a text
        y: A key
    """


def default(x: int = 42):
    """Count.

    Args:
         x: A number
    """


def nested_list(x: list[list[str | int]]):
    """Tabulate.

    Args:
        x: Rows of cells
    """


def several(x: int, y: str):
    """Repeat.

    Args:
        x: How often
        y: What
    """


def several_unions(x: list[int | float], y: int | str | None = None):
    """Sum.

    Args:
        x: Numbers
        y: A key
    """


def complex_union(x: str | list[str], y: Literal["a", "b"] | int | None = None):
    """Search.

    Args:
        x: One or many
        y: A grade
    """


def returns(x: int) -> int:
    """Square.

    Args:
        x: A side
    """
    return x * x


def returns_described(x: int) -> int:
    """Square.

    Args:
        x: A side


    Returns:
        The area
    """
    return x * x


def fixed_tuple(x: tuple[int, str]):
    """Label.

    Args:
        x: Number and label

    Returns:
        Nothing much
    """


def single_tuple(x: tuple[int]):
    """Label.

    Args:
        x: A number
    """


def open_tuple(x: tuple[int, ...]):
    """Label.

    Args:
        x: Numbers
    """


def choices(unit: str):
    """Convert.

    Args:
        unit: Unit to use (Choices: ["metre", "foot"])

    Returns:
        The length
    """


def other_choices(stars: int, open_now: bool):
    """Filter.

    Args:
        stars: Least rating (choices: [1, 2, 3])
        open_now: Only open ones (choices: [true, false])
    """


def literals(unit: Literal["metre", "foot"], yes: Literal[True, False, 0, 1, "y", "n"] = False):
    """Convert.

    Args:
        unit: Unit to use
        yes: Anything that means yes or no
    """


def long_descriptions(x: int, y: int):
    """Draw

    Args:
        x: First corner

        y: Second corner. It is described at some length,
           on more than one line, with deeper indentation.

    Returns:
        A picture
    """


def returns_none(x: int) -> None:
    """Wait.

    Args:
        x: How long
    """


def dictionaries(x: dict[str, int], y: dict[str, list[float]], z: Any = None):
    """Merge.

    Args:
        x: Counts
        y: Series
        z: Anything
    """


def everything(
    x: str, y: list[str | int] | None, z: tuple[str | int, str] = (42, "hello")
) -> tuple[int, str]:
    """Do several things at once, with a description that is a bit longer.

    Args:
        x: One of three. It is described over
           several lines and ends with
           (choices: ["a", "b", "c"])

        y: A list. It is described on one line.

        z: A pair with a default.

    Returns:
        A pair. The description has
        two lines.
    """
    return len(x), str(y)


class Holder:
    def method(self, x: int):
        """Count.

        Args:
            x: A number
        """

    @staticmethod
    def static(x: int):
        """Count.

        Args:
            x: A number
        """

    @classmethod
    def on_class(cls, x: int):
        """Count.

        Args:
            x: A number
        """


def multiply(a: float, b: float):
    """
    A function that multiplies two numbers

    Args:
        a: The first number to multiply
        b: The second number to multiply
    """
    return a * b


def weather(location: str, unit: str):
    """
    Tell the weather at a place.

    Example: Paris.

    Args:
        location: City and country, as "City, Country"
        unit: Unit of the answer (choices: ["celsius", "fahrenheit"])
    Returns:
        The weather
    Raises:
        KeyError: There is no such place
    """


ACCEPTED: list[Callable[..., Any]] = [
    *(
        one,
        nothing,
        bare_containers,
        union,
        duplicate_union,
        optional,
        optional_old,
        default,
        nested_list,
        several,
    ),
    *(
        several_unions,
        complex_union,
        returns,
        returns_described,
        fixed_tuple,
        choices,
        other_choices,
        literals,
    ),
    *(long_descriptions, returns_none, dictionaries, everything, multiply, weather),
    *(Holder.method, Holder().method, Holder.static, Holder().static, Holder.on_class, Holder().on_class),
]
REFUSED_THERE: list[Callable[..., Any]] = [single_tuple, open_tuple]


def meaning(schema: Any) -> Any:
    """Bring a schema to a form in which different ways to say one thing are equal."""
    if not isinstance(schema, dict):
        return schema
    node = {key: value for key, value in schema.items() if key not in {"description", "default"}}
    kinds: list[Any] = []
    if node.pop("nullable", False):
        kinds.append("null")
    named = node.pop("type", None)
    members = node.pop("anyOf", [{"type": kind} for kind in named] if isinstance(named, list) else [])
    if "enum" in node:  # an enum says its types itself
        members, named = [], None
    flat = [meaning(member) for member in members]
    kinds += [kind for kind in flat if kind not in kinds and kind != {"type": "null"}]
    if {"type": "null"} in flat and "null" not in kinds:
        kinds.append("null")
    if not isinstance(named, list) and named is not None:
        node["type"] = named
    for key in ("items", "additionalProperties"):
        if key in node:
            node[key] = meaning(node[key])
    if "prefixItems" in node:
        node["prefixItems"] = [meaning(entry) for entry in node["prefixItems"]]
        for key in ("minItems", "maxItems"):  # ours says more
            assert node.pop(key, len(node["prefixItems"])) == len(node["prefixItems"])
    if node.get("additionalProperties") is True:
        del node["additionalProperties"]
    if node.get("items") == {}:
        del node["items"]
    if not kinds:
        return node
    if node and "enum" not in node:
        kinds.append(node)
        node = {}
    unique: list[Any] = []
    for kind in kinds:
        if kind not in unique:
            unique.append(kind)
    if "enum" in node:
        node["enum"] = [*node["enum"], None] if "null" in kinds and None not in node["enum"] else node["enum"]
        return node
    return unique[0] if len(unique) == 1 else {"any": sorted(unique, key=str)}


@pytest.mark.parametrize("function", ACCEPTED, ids=lambda function: function.__qualname__)
def test_ours_says_the_same_or_more(function: Callable[..., Any]) -> None:
    theirs = transformers_utils.get_json_schema(function)["function"]

    made = Tool.from_function(function)
    ours = made.schema()["function"]

    assert ours["name"] == theirs["name"]
    assert ours["description"] == theirs["description"]
    assert ours["parameters"].get("required", []) == theirs["parameters"].get("required", [])
    assert list(ours["parameters"]["properties"]) == list(theirs["parameters"]["properties"])
    for name, entry in theirs["parameters"]["properties"].items():
        mine = ours["parameters"]["properties"][name]
        assert mine["description"] == entry["description"]
        assert meaning(mine) == meaning(entry), name
    if "return" in theirs:
        assert made.returns is not None
        assert meaning(made.returns) == meaning(theirs["return"])
        assert made.returns.get("description", "").split() == theirs["return"].get("description", "").split()


@pytest.mark.parametrize("function", REFUSED_THERE, ids=lambda function: function.__qualname__)
def test_what_transformers_refuses_works_here(function: Callable[..., Any]) -> None:
    with pytest.raises(transformers_utils.TypeHintParsingException):
        transformers_utils.get_json_schema(function)

    assert Tool.from_function(function).parameters["properties"]["x"]["type"] == "array"


def undocumented(x: int) -> None: ...


def half_documented(x: int) -> None:
    """Count."""


def test_missing_descriptions_are_a_note_here_and_an_error_there() -> None:
    for function in (undocumented, half_documented):
        with pytest.raises(transformers_utils.DocstringParsingException):
            transformers_utils.get_json_schema(function)
        made = Tool.from_function(function)

        assert "tool " + function.__name__ + ": parameter 'x' has no description" in made.notes
        assert made.parameters["properties"]["x"] == {"type": "integer"}


def unannotated(x):  # type: ignore[no-untyped-def]
    """Count.

    Args:
        x: A number
    """


def test_a_missing_annotation_is_an_error_in_both() -> None:
    with pytest.raises(transformers_utils.TypeHintParsingException):
        transformers_utils.get_json_schema(unannotated)
    with pytest.raises(TypeError, match="'x' has no annotation"):
        Tool.from_function(unannotated)
