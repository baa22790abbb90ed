"""Values that were read once are what reading the JSON again would give, for every tool."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from agentenv.tools import tool
from agentenv.tools.arguments import Validator


class Point(BaseModel):
    x: int
    names: list[str] | None = None


@tool
def plain(
    number: int,
    share: float = 0.0,
    text: str = "",
    flag: bool = False,
    words: list[str] | None = None,
    counts: dict[str, int] | None = None,
    kind: Literal["a", "b"] = "a",
    anything: Any = None,
    point: Point | None = None,
    *,
    points: dict[int, list[Point]] | None = None,
    **rest: float,
) -> None:
    """Take only types that pydantic reads alike from JSON and from Python."""


MODEL = plain.definition.arguments
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "a", "1", "-2.5", "true", "null", "x y", "2026-01-31"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "names", "1"]), inner),
)
arguments = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        (
            *[
                "number",
                "share",
                "text",
                "flag",
                "words",
                "counts",
                "kind",
                "anything",
                "point",
                "points",
                "other",
            ],
        ),
        values,
    ),
)


def outcome(validate) -> object:
    try:
        return validate().model_dump()
    except ValidationError:
        return "refused"


@given(arguments)
def test_plain_types_take_the_same_from_values_as_from_their_json(given_arguments):
    text = json.dumps(given_arguments)

    from_values = outcome(lambda: MODEL._model.model_validate(given_arguments))
    from_json = outcome(lambda: MODEL._model.model_validate_json(text))

    assert MODEL._reads_alike
    assert from_values == from_json
    assert repr(from_values) == repr(from_json), "equal values of another type, such as 1 and True"


@pytest.mark.parametrize(
    "annotation", ["datetime.date", "set[int]", "int | str", "bytes", "decimal.Decimal", "tuple[int, ...]"]
)
def test_types_that_read_json_more_freely_are_left_to_pydantic(annotation):
    import datetime
    import decimal

    namespace: dict[str, Any] = {"datetime": datetime, "decimal": decimal}
    exec(f"def f(a: {annotation}): 'Take one.'", namespace)

    made = tool(namespace["f"]).definition.arguments

    assert isinstance(made, Validator)
    assert not made._reads_alike
