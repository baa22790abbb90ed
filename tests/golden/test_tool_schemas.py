"""The exact bytes of tool schemas: a change of theirs changes every prompt, so it is reviewed."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from agentenv.tools import Tool
from agentenv.tools.schema import Dialect
from agentenv_tools.arithmetic import calculator

FOLDER = Path(__file__).with_name("tool_schemas")


class Size(Enum):
    """Sizes there are."""

    SMALL = "s"
    LARGE = "l"


class Line(BaseModel):
    """One line of an order."""

    item: str = Field(description="What to buy.")
    count: int = Field(1, ge=1, le=99)
    size: Size = Size.SMALL
    parts: list[Line] = []


def order(
    lines: list[Line],
    address: Annotated[str, "Street and town."],
    express: bool = False,
    payment: Literal["card", "cash"] | None = None,
) -> str:
    """Order things.

    Nothing is paid before it arrives.

    Args:
        lines: What to order.
        address: Overruled by the annotation.
        express: Send today.
        payment: How to pay; asked at the door if left out.
    """
    return f"{len(lines)} {address} {express} {payment}"


@pytest.mark.parametrize("dialect", ["openai", "strict", "inline"])
@pytest.mark.parametrize("made", [Tool.from_function(order), calculator], ids=lambda made: made.name)
def test_schema_bytes_are_those_on_record(
    made: Tool[..., object], dialect: Dialect, update_golden: bool
) -> None:
    path = FOLDER / f"{made.name}.{dialect}.json"
    text = made.schema_text(dialect) + "\n"
    if update_golden:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)

    assert path.read_text() == text
