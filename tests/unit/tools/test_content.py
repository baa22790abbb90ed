"""What a tool returns, as the model reads it."""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pytest
from pydantic import BaseModel

from agentenv.tools import Image
from agentenv.tools.content import to_content


class Level(StrEnum):
    LOW = "low"


class Side(Enum):
    LEFT = (1, 2)


class Model(BaseModel):
    when: date
    tags: set[str] = set()


@dataclass
class Data:
    x: int
    inner: Model | None = None


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('as is, with "quotes" and é', 'as is, with "quotes" and é'),
        ("", ""),
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (2.5, "2.5"),
        (10**40, "1" + "0" * 40),
        (float("nan"), '"NaN"'),
        (float("-inf"), '"-Infinity"'),
        ({"a": [1, float("inf"), {"b": float("nan")}]}, '{"a": [1, "Infinity", {"b": "NaN"}]}'),
        ({"é": "ü"}, '{"é": "ü"}'),
        ((1, "a"), '[1, "a"]'),
        ([], "[]"),
        (["a", "b"], '["a", "b"]'),
        ({3, 1, 2}, "[1, 2, 3]"),
        ({"b", "a"}, '["a", "b"]'),
        ({1: "a", None: "b", 2.5: "c"}, '{"1": "a", "null": "b", "2.5": "c"}'),
        ({(1, 2): "a"}, '{"[1, 2]": "a"}'),
        ({Level.LOW: 1}, '{"low": 1}'),
        (Level.LOW, '"low"'),
        (Side.LEFT, "[1, 2]"),
        (Pair(1, 2), "[1, 2]"),
        (OrderedDict(a=1), '{"a": 1}'),
        (date(2026, 1, 2), '"2026-01-02"'),
        (datetime(2026, 1, 2, tzinfo=UTC), '"2026-01-02T00:00:00Z"'),
        (timedelta(seconds=90), '"PT1M30S"'),
        (Decimal("1.10"), '"1.10"'),
        (Fraction(1, 3), '"1/3"'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (PurePosixPath("/a/b"), '"/a/b"'),
        (ValueError("bad"), '"bad"'),
        (Data(1, Model(when=date(2026, 1, 2))), '{"x": 1, "inner": {"when": "2026-01-02", "tags": []}}'),
        (np.int64(3), "3"),
        (np.float32(0.5), "0.5"),
        (np.bool_(True), "true"),
        (np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
        ({"x": np.float64("nan")}, '{"x": "NaN"}'),
        ("half \ud83d character", "half \ufffd character"),
        ({"x": "\udc00"}, '{"x": "\ufffd"}'),
    ],
    ids=lambda given: "a set" if isinstance(given, set) else repr(given),  # the order of a set is no name
)
def test_text_as_is_and_everything_else_as_json(value: Any, text: str) -> None:
    content = to_content(value)

    assert content == text
    if not isinstance(value, str) or isinstance(value, Enum):
        json.loads(text)


@pytest.mark.parametrize("data", [b"\x00\xff", bytearray(b"\x00\xff"), memoryview(b"\x00\xff")])
def test_bytes_are_base64_with_a_note(data: Any) -> None:
    assert json.loads(str(to_content(data))) == {"encoding": "base64", "num_bytes": 2, "data": "AP8="}


def test_text_and_images_may_be_mixed_and_what_only_looks_like_parts_stays_json() -> None:
    data = b"\x89PNG"
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    assert to_content(Image(data)) == [{"type": "image_url", "image_url": {"url": url}}]

    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    content = to_content(["look:", Image(b"x", "image/jpeg"), part, {"type": "text", "text": "done"}])
    assert isinstance(content, list)
    assert [entry.get("type") for entry in content] == ["text", "image_url", "image_url", "text"]
    assert content[2] == part

    alike = [{"type": "text", "text": "a"}, {**part, "more": 1}]
    assert json.loads(str(to_content(alike))) == alike


@pytest.mark.parametrize("value", [object(), (x for x in "a"), len, {"x": object()}, [iter([])], Model])
def test_what_has_no_json_form_names_its_type(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        to_content(value)
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(ValueError, match="contains itself"):
        to_content(itself)
