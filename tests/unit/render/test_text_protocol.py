"""The text that describes tools to a model whose template has no place for them."""

from __future__ import annotations

import datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field

import agentenv as ae
from agentenv.render import TextProtocol
from agentenv.tools import Toolbox


class Part(BaseModel):
    sku: Annotated[str, Field(description="Number of the article.", pattern="^[A-Z]+$")]
    count: int = Field(1, ge=1, le=9)
    parts: list[Part] = []


@ae.tool
def order(items: list[Part], day: datetime.date, note: str | None = None) -> str:
    """Order parts.

    Args:
        items: What to order.
        day: Day of delivery,
            in the year 2026.
    """
    return f"{items} {day} {note}"


def lines_of(tools: list[Any], protocol: TextProtocol) -> list[str]:
    return protocol.system_text(tools).splitlines()[2:]


def test_arguments_their_fields_and_their_formats_are_described() -> None:
    assert lines_of(Toolbox([order]).schemas(), TextProtocol()) == [
        "order(items: list[Part], day: str (date), note: str | None = null): Order parts.",
        "  items: What to order.",
        "  day: Day of delivery, in the year 2026.",
        "  Part: {sku: str (matches ^[A-Z]+$), count: int (>= 1, <= 9) = 1, parts: list[Part] = []}",
        "  Part.sku: Number of the article.",
    ]


def test_fields_of_types_without_a_name_are_described_where_they_stand() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number", "description": "To the east."}}}
    path = {"anyOf": [{"type": "array", "items": point}, {"type": "null"}], "description": "The way."}
    tool = {"name": "walk", "parameters": {"type": "object", "properties": {"path": path}}}

    assert lines_of([tool], TextProtocol()) == [
        "walk(path: list[{x: float = None}] | None = None)",
        "  path: The way.",
        "  path[].x: To the east.",
    ]


def test_a_single_plain_argument_has_no_line_of_its_own() -> None:
    @ae.tool
    def look(place: str) -> str:
        """Look around.

        Args:
            place: Where to look.
        """
        return place

    lines = lines_of(Toolbox([look, order]).schemas(), TextProtocol())

    assert not any("Where to look" in line for line in lines)
    assert any("What to order" in line for line in lines)


def test_the_text_of_the_calculator_is_the_one_of_the_published_figures() -> None:
    assert TextProtocol().system_text(ae.make("agentenv/Calculator-v0").unwrapped.tool_schemas) == (
        'To call a tool, write <tool_call>{"name": "calculator", "arguments": {"expression": ...}}</tool_call>\n'
        "Tools:\n"
        "calculator(expression: str): Evaluate an arithmetic expression exactly, such as 17*23 or sqrt(2)/3."
    )
