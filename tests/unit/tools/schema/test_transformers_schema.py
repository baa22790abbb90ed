"""Where transformers' `get_json_schema` accepts a function, ours says the same or more.

The functions have the shapes that transformers documents and tests: each of its cases once, those
it refuses included. A schema is compared by meaning: both are brought to one form in which unions
of types, `nullable` and `anyOf` with null read the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, Optional, Union

import pytest

from agentenv.tools import Tool

transformers_utils = pytest.importorskip("transformers.utils.chat_template_utils")


def shaped(returns: Any = None, told: str = "", default: Any = inspect.Parameter.empty, **given: Any) -> Any:
    """A function whose parameters have these annotations, each with a description, and a default for the last."""

    def count(**values: Any) -> Any: ...

    arguments = "".join(f"    {name}: What {name} is\n" for name in given)
    count.__doc__ = "Count." + (f"\n\nArgs:\n{arguments}" if given else "") + told
    count.__annotations__ = given | ({} if returns is None else {"return": returns})
    defaults = dict.fromkeys(list(given)[-1:], default)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    count.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, kind, annotation=each, default=defaults.get(name, inspect.Parameter.empty)
            )
            for name, each in given.items()
        ],
        return_annotation=inspect.Signature.empty if returns is None else returns,
    )
    return count


def other_choices(stars: int, open_now: bool):
    """Filter.

    Args:
        stars: Least rating (choices: [1, 2, 3])
        open_now: Only open ones (choices: [true, false])
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


ACCEPTED: dict[str, Callable[..., Any]] = {
    "one": shaped(x=int),
    "nothing": shaped(),
    "bare containers": shaped(x=list, y=tuple, z=dict),
    "union of containers": shaped(x=list | tuple, y=list | tuple | dict | None, default=None),
    "optional": shaped(x=int | None),
    "optional, spelled as of old": shaped(x=Optional[str], y=Union[int, str], default=3),  # noqa: UP007, UP045
    "default": shaped(x=int, default=42),
    "nested list": shaped(x=list[list[str | int]]),
    "several unions": shaped(x=list[int | float], y=int | str | None, default=None),
    "unions of containers and values": shaped(
        x=str | list[str], y=Literal["a", "b"] | int | None, default=None
    ),
    "returns": shaped(int, x=int),
    "returns what is described": shaped(int, "\n\nReturns:\n    The area\n", x=int),
    "returns none": shaped(type(None), x=int),
    "fixed tuple": shaped(None, "\nReturns:\n    Nothing much\n", x=tuple[int, str]),
    "literals": shaped(x=Literal["metre", "foot"], y=Literal[True, False, 0, 1, "y", "n"], default=False),
    "dictionaries": shaped(x=dict[str, int], y=dict[str, list[float]], z=Any, default=None),
    "other choices": other_choices,
    "everything": everything,
    "weather": weather,
    "method": Holder.method,
    "bound method": Holder().method,
}


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


@pytest.mark.parametrize("function", ACCEPTED.values(), ids=ACCEPTED)
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


def undocumented(x: int) -> None: ...


def half_documented(x: int) -> None:
    """Count."""


@pytest.mark.parametrize(
    ("function", "kind", "told"),
    [
        (shaped(x=tuple[int]), "array", ()),
        (shaped(x=tuple[int, ...]), "array", ()),
        (undocumented, "integer", ("tool undocumented: parameter 'x' has no description",)),
        (half_documented, "integer", ("tool half_documented: parameter 'x' has no description",)),
    ],
)
def test_what_transformers_refuses_works_here(function: Any, kind: str, told: tuple[str, ...]) -> None:
    refused = (transformers_utils.TypeHintParsingException, transformers_utils.DocstringParsingException)
    with pytest.raises(refused):
        transformers_utils.get_json_schema(function)
    made = Tool.from_function(function)

    assert made.parameters["properties"]["x"]["type"] == kind
    assert set(told) <= set(made.notes)
